"""What a kill and a Redis without its data cost: time, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import shutil
from typing import Any

import pytest

from ludic.pipeline import Bounds, LocalRedis, PipelineConfig
from ludic.pipeline.store import Store, entries, flat
from tests.pipeline.test_batch_source import acting, announced, units_of
from tests.pipeline.world import make_source, server_of

pytestmark = pytest.mark.redis


def empty(server: LocalRedis) -> None:
    """A crash that costs the server everything it had."""
    server.kill()
    shutil.rmtree(server.folder)
    server.start()


def over(server: LocalRedis) -> PipelineConfig:
    return PipelineConfig(server.url, "lost-data", patience_s=60.0, call_s=5.0)


async def drop_one(source: Any, store: Store) -> None:
    """Unit 0 comes damaged, and the trainer drops it."""
    ((entry, number, _),) = entries(store.run("take", "by-hand", 1, 60_000, "0-0")[1])
    assert store.run("append", "by-hand", entry, number, b"noise", 0) == b"ok"
    await source._read(">")
    _, dropped = source._choose()
    assert dropped == [(0, "damaged")]
    await source.lease.run_async("discard", *flat(dropped))


@pytest.mark.parametrize("asked_again", [False, True])
@pytest.mark.parametrize("asked_before", [False, True])
async def test_what_was_dropped_before_a_kill_stops_no_resumed_run(
    config: PipelineConfig, store: Store, asked_before: bool, asked_again: bool
) -> None:
    """The checkpoint is from before or after the unit was asked for, and from before its drop."""
    first = await announced(make_source(config))
    await first.open()
    state = first.state_dict()
    await first._ask_more()
    if asked_before:
        state = first.state_dict()
    await drop_one(first, store)
    if asked_again:
        await first._ask_more()
    first.lease.close()

    second = make_source(config)
    second.load_state_dict(state)
    await announced(second)
    await second.open()
    books = second.ledger
    assert books.dropped == {"damaged": 1}
    assert [a.of for a in (*books.outstanding.values(), *books.waiting)].count(0) == 1
    async with acting(config):
        assert [units_of(await second.next_batch()) for _ in range(2)] == [[1, 2], [3, 4]]
    await second.close()


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_redis_that_comes_back_empty_costs_nothing(
    own_server: LocalRedis, resumed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The actors survive, and follow the policies that come after."""
    config = over(own_server)
    source = await announced(make_source(config, max_lag=0, lease_s=20.0))
    with caplog.at_level(logging.WARNING):
        async with acting(config, 2, lease_s=20.0):
            assert units_of(await source.next_batch()) == [0, 1]
            await asyncio.to_thread(source.lease.announce, 1)
            before = source.lease.serial
            await asyncio.to_thread(empty, own_server)
            if resumed:
                state = source.state_dict()
                source.lease.close()
                source = make_source(config, max_lag=0, lease_s=20.0)
                source.load_state_dict(state)
                await announced(source, 1)
            for version in (2, 3):
                batch = await asyncio.wait_for(source.next_batch(), 60)
                assert units_of(batch) == [2 * version - 2, 2 * version - 1]
                await asyncio.to_thread(source.lease.announce, version)
    assert source.ledger.dropped == {}
    assert (source.lease.attempt, source.lease.serial > before) == (2, True)
    assert ("goes on from the trainer's own books" in caplog.text) is not resumed
    assert "another trainer" not in caplog.text
    await source.close()


async def test_units_that_the_server_lost_are_asked_for_again_while_the_trainer_waits(
    config: PipelineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash that cost the last second: the run is there, and some units are not."""
    monkeypatch.setattr("ludic.pipeline.batch_source._ASK_AGAIN_S", 0.5)
    source = await announced(make_source(config))
    await source.open()
    await source._ask_more()
    server_of(store).hdel(store.keys["units"], 0, 1)
    server_of(store).xtrim(store.keys["requests"], maxlen=2, approximate=False)
    async with acting(config):
        assert units_of(await asyncio.wait_for(source.next_batch(), 60)) == [0, 1]
    await source.close()


@pytest.mark.parametrize("lost", [0, 5])
async def test_a_resumed_run_starts_over_where_the_server_lost_some_units(
    config: PipelineConfig, store: Store, lost: int
) -> None:
    """One that the checkpoint has, or one that was asked for after it."""
    first = await announced(make_source(config, bounds=Bounds(8), stale="drop"))
    await first.open()
    first.bounds = Bounds(4)
    await first._ask_more()
    state = first.state_dict()
    first.bounds = Bounds(8)
    await first._ask_more()
    assert first.ledger.next == 8
    first.lease.close()
    server_of(store).hdel(store.keys["units"], lost)
    second = make_source(config)
    second.load_state_dict(state)
    await announced(second)
    await second.open()
    assert store.facts()["requests"] == 4, "which unit is which, nobody knows any more"
    async with acting(config):
        assert units_of(await second.next_batch()) == [0, 1]
    await second.close()
