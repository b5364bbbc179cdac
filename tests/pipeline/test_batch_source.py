"""The trainer's side: batches, resuming, attempts, staleness, bounds; and actors beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.errors import ConfigError, DeadlineError, PipelineError
from ludic.pipeline import Bounds, PipelineBatchSource, PipelineConfig, TrainerLease
from ludic.pipeline.actor import ActorReport
from ludic.pipeline.messages import read_group
from ludic.pipeline.store import Store, entries
from ludic.rollouts import RolloutRequest
from ludic.saw import SAWBatch
from ludic.training.batching.source import BatchSource
from tests.pipeline.world import (
    REQUEST,
    Recorded,
    act,
    make_source,
    make_trainer,
    trained_units,
)

pytestmark = pytest.mark.redis


@asynccontextmanager
async def acting(
    config: PipelineConfig, count: int = 1, **options: Any
) -> AsyncIterator[list[asyncio.Task[ActorReport]]]:
    """Actors in this process for as long as the block runs; their errors are the test's."""
    stop = asyncio.Event()
    tasks = [asyncio.create_task(act(config, stop=stop, **options)) for _ in range(count)]
    try:
        yield tasks
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)


async def until(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.02)
    return found


def units_of(batch: SAWBatch) -> list[int]:
    return sorted({int(i.rollout_id.split("/")[0].removeprefix("unit-")) for i in batch.items})


async def announced(source: PipelineBatchSource, version: int = 0) -> PipelineBatchSource:
    """As a trainer's publisher does before the first batch."""
    await source.lease.acquire_async()
    await asyncio.to_thread(source.lease.announce, version)
    return source


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


async def test_it_is_a_batch_source_like_any_other(config: PipelineConfig, store: Store) -> None:
    source = make_source(config)
    assert isinstance(source, BatchSource)
    async with await announced(source), acting(config):
        first, second = await source.next_batch(), await source.next_batch()
    assert (units_of(first), units_of(second)) == ([0, 1], [2, 3])
    assert first.counts.groups == 2
    assert first.meta["train/pipeline_lag_max"] == 0


async def test_a_run_of_many_actors_trains_on_every_unit_once(
    config: PipelineConfig, store: Store, tmp_path: Path
) -> None:
    source = make_source(config, kind=Recorded)
    source.record = tmp_path / "record"  # type: ignore[attr-defined]
    trainer = make_trainer(source, tmp_path / "ck")
    async with acting(config, 4):
        await trainer.train(6)
    await source.close()
    units = trained_units(tmp_path / "record")
    assert units == {step: [2 * step - 2, 2 * step - 1] for step in range(1, 7)}
    facts = store.facts()
    assert facts["groups"] <= 2 * 2, "only those that were asked for ahead are left"
    assert facts["meta"]["low"] == "12"


async def test_the_final_weights_do_not_depend_on_the_actors(
    config: PipelineConfig, store: Store, tmp_path: Path
) -> None:
    found = []
    for number in (1, 3):
        mine = replace(config, run=f"{config.run}-{number}")
        source = make_source(mine)
        trainer = make_trainer(source, tmp_path / f"ck-{number}")
        async with acting(mine, number, latency_s=0.001 * number):
            await trainer.train(3)
        await source.close()
        found.append(weights_of(trainer))
        Store(mine).forget()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("background", [False, True])
async def test_what_a_checkpoint_has_is_acknowledged_and_nothing_else(
    config: PipelineConfig, store: Store, tmp_path: Path, background: bool
) -> None:
    source = make_source(config, every=2)
    trainer = make_trainer(source, tmp_path, every=2, background=background)
    async with acting(config):
        await trainer.start()
        trainer._goal = None
        for _ in range(3):
            await trainer.train_step()
        if background:
            await trainer._run(trainer._checkpoints.finish)  # type: ignore[union-attr]
        facts = await asyncio.to_thread(store.facts)
        # Two of the three updates are in the checkpoint; the third's groups are still there.
        assert facts["meta"]["low"] == "4"
        assert min(facts["units"]) == 4
    await source.close()


async def test_a_resumed_run_reads_again_what_was_not_committed(
    config: PipelineConfig, store: Store, tmp_path: Path
) -> None:
    straight = make_source(replace(config, run=f"{config.run}-straight"))
    reference = make_trainer(straight, tmp_path / "reference")
    async with acting(straight.lease.config):
        await reference.train(6)
    await straight.close()
    Store(straight.lease.config).forget()

    async with acting(config, 2):
        first = make_source(config, kind=Recorded)
        first.record = tmp_path / "record"  # type: ignore[attr-defined]
        trainer = make_trainer(first, tmp_path / "ck")
        await trainer.start()
        trainer._goal = None
        for _ in range(3):
            await trainer.train_step()
        first.lease.close()  # gone without a word: its last update is in no checkpoint
        second = make_source(config, kind=Recorded)
        second.record = tmp_path / "record"  # type: ignore[attr-defined]
        resumed = make_trainer(second, tmp_path / "ck")
        await resumed.train(6)
        await second.close()
    assert resumed.step == 6
    assert trained_units(tmp_path / "record") == {s: [2 * s - 2, 2 * s - 1] for s in range(1, 7)}
    expected = weights_of(reference)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(resumed).items())


async def test_a_checkpoint_that_was_never_acknowledged_is_when_the_run_goes_on(
    config: PipelineConfig, store: Store
) -> None:
    first = await announced(make_source(config))
    async with acting(config):
        await first.next_batch()
        state = first.state_dict()  # in a checkpoint; killed before `committed`
        first.lease.close()
        second = make_source(config)
        second.load_state_dict(state)
        await announced(second)
        assert units_of(await second.next_batch()) == [2, 3]
    assert store.facts()["meta"]["low"] == "2"
    await second.close()


async def test_an_older_checkpoint_starts_over_from_there(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    async with acting(config):
        await source.next_batch()
        old = source.state_dict()
        await source.next_batch()
        source.committed(source.state_dict())
        attempt = source.lease.attempt
        await source.close()
        again = make_source(config)
        again.load_state_dict(old)
        await announced(again)
        batch = await again.next_batch()
        assert again.lease.attempt > attempt
        assert units_of(batch) == [2, 3]
        found = await asyncio.to_thread(again.lease.store.facts)
        assert found["meta"]["low"] == "2"
        await again.close()


async def test_token_spans_name_attempt_and_version(config: PipelineConfig, store: Store) -> None:
    spans = set()
    state = None
    for version in (4, 4):
        source = make_source(config, max_lag=0)
        if state is not None:
            source.load_state_dict(state)
        await announced(source, version)
        async with acting(config):
            await source.open()
            await source._ask_more()
            await until(lambda: len(store.facts()["units"]) >= 2 and store.facts()["groups"] >= 2)
            answer = await asyncio.to_thread(source.lease.run, "read", "0", 10)
            answer = answer[1] or (await asyncio.to_thread(source.lease.run, "read", ">", 10))[1]
            for _, _, message in entries(answer):
                for rollout in read_group(message).rollouts:
                    for step in rollout.agent_steps:
                        assert step.trace is not None
                        spans |= {(s.attempt, s.version) for s in step.trace.version_spans}
            source._groups.clear()
            for _, number, message in entries(answer):
                source._groups[number] = read_group(message)
            await source.next_batch()
            state = source.state_dict()
            await source.close()
    assert spans == {(1, 4), (2, 4)}


async def test_units_that_a_lost_trainer_asked_for_are_not_made_again(
    config: PipelineConfig, store: Store
) -> None:
    first = await announced(make_source(config))
    await first.open()
    state = first.state_dict()
    await first._ask_more()
    first.lease.close()
    before = store.facts()
    second = make_source(config)
    second.load_state_dict(state)
    await announced(second)
    await second.open()
    assert store.facts()["requests"] == before["requests"] == 4
    assert second.ledger.next == 4
    # The curriculum went on, too: what comes next is what would have come next.
    assert first._feed.state_dict() == second._feed.state_dict()
    await second.close()


async def test_a_server_that_lost_its_data_is_asked_for_everything_again(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    async with acting(config):
        await source.next_batch()
        state = source.state_dict()
        await source.close()
    store.forget()
    again = make_source(config)
    again.load_state_dict(state)
    await announced(again)
    async with acting(config):
        assert units_of(await again.next_batch()) == [2, 3]
    await again.close()


async def test_committed_groups_without_a_checkpoint_are_somebody_elses(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    async with acting(config):
        await source.next_batch()
        source.committed(source.state_dict())
        await source.close()
    fresh = await announced(make_source(config))
    with pytest.raises(PipelineError, match="there is no checkpoint here"):
        await fresh.open()
    await fresh.close()


# Staleness


async def lags_of(config: PipelineConfig, updates: int = 6, **options: Any) -> list[int]:
    """How old the samples of each update were, with a trainer that publishes after each."""
    source = await announced(make_source(config, every=100, bounds=Bounds(200), **options))
    lags = []
    async with acting(config, 2):
        for version in range(1, updates + 1):
            batch = await source.next_batch()
            lags.append(int(batch.meta["train/pipeline_lag_max"]))
            await asyncio.to_thread(source.lease.announce, version)
            await asyncio.sleep(0.1)  # actors that may run ahead do
    await source.close()
    return lags


@pytest.mark.parametrize("max_lag", [0, 1, 2])
async def test_actors_wait_so_that_no_sample_is_older_than_max_lag(
    config: PipelineConfig, store: Store, max_lag: int
) -> None:
    assert max(await lags_of(config, max_lag=max_lag, stale="wait")) <= max_lag
    assert "stale" not in store.facts()["meta"].get("counters", "")


async def test_what_is_too_old_is_dropped_counted_and_put_back(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config, stale="drop", bounds=Bounds(12), every=2))
    async with acting(config):
        first = await source.next_batch()
        await until(lambda: store.facts()["groups"] >= 10)
        await asyncio.to_thread(source.lease.announce, 5)
        second = await source.next_batch()
        books = source.ledger
        assert units_of(first) == [0, 1]
        assert second.meta["train/pipeline_lag_max"] <= 1
        dropped = books.dropped["stale"]
        assert dropped >= 10
        assert second.meta["train/pipeline_dropped_stale"] == dropped
        # Accounted for once each: trained, dropped, or still to come.
        assert books.trained + dropped + len(books.outstanding) == books.next
        again = [a.of for a in (*books.outstanding.values(), *books.waiting) if a.of is not None]
        assert len(again) == len(set(again))
    await source.close()


async def test_what_is_too_old_is_trained_on_where_the_loss_corrects_for_it(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config, stale="correct", bounds=Bounds(12), every=2))
    async with acting(config):
        await source.next_batch()
        await until(lambda: store.facts()["groups"] >= 10)
        await asyncio.to_thread(source.lease.announce, 5)
        batch = await source.next_batch()
    assert batch.meta["train/pipeline_lag_max"] == 5
    assert source.ledger.dropped == {}
    await source.close()


async def test_a_sample_of_a_newer_version_is_not_behind(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config, max_lag=0), version=9)
    async with acting(config):
        await source.open()
        await source._ask_more()
        await until(lambda: store.facts()["groups"] == 2)
        await asyncio.to_thread(source.lease.announce, 3)  # as after a resume
        batch = await source.next_batch()
    assert batch.meta["train/pipeline_lag_max"] == 0
    await source.close()


# Bounds


def test_a_bound_below_one_checkpoint_interval_is_refused(config: PipelineConfig) -> None:
    with pytest.raises(ConfigError, match="below the 20 of one checkpoint interval"):
        make_source(config, every=10, bounds=Bounds(19))


async def test_a_run_without_checkpoints_says_so_where_the_bound_is_reached(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config, every=2, bounds=Bounds(4)))
    async with acting(config):
        await source.next_batch()
        await source.next_batch()
        with pytest.raises(PipelineError, match="wait for a checkpoint"):
            await source.next_batch()
    await source.close()


async def test_a_slow_trainer_bounds_what_redis_holds(config: PipelineConfig, store: Store) -> None:
    source = await announced(
        make_source(config, every=1, stale="drop", max_lag=3, bounds=Bounds(8, 6000))
    )
    async with acting(config, 2):
        for version in range(1, 6):
            await source.next_batch()
            source.committed(source.state_dict())
            await asyncio.to_thread(source.lease.announce, version)
            await asyncio.sleep(0.3)
            facts = await asyncio.to_thread(store.facts)
            assert len(facts["units"]) <= 8
            assert int(facts["meta"]["bytes"]) < 6000 + 8 * 3000
    await source.close()


# Waiting


async def test_a_wait_for_actors_that_never_come_ends_and_says_so(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config, wait_s=0.5))
    with pytest.raises(DeadlineError, match=r"2 groups \(0 are there\) from the 0 actors"):
        await source.next_batch()
    await source.close()


async def test_a_call_that_is_cancelled_loses_nothing(config: PipelineConfig, store: Store) -> None:
    source = await announced(make_source(config))
    async with acting(config, latency_s=0.05):
        for delay in (0.0, 0.01, 0.05, 0.1, 0.2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(source.next_batch(), delay)
                break
        done = source.ledger.trained
        assert units_of(await source.next_batch()) == [done, done + 1]
        assert units_of(await source.next_batch()) == [done + 2, done + 3]
    await source.close()


async def test_two_trainers_on_one_run_are_refused(config: PipelineConfig, store: Store) -> None:
    first = await announced(make_source(config, lease_s=1.0))
    second = TrainerLease(config, lease_s=1.0)
    with pytest.raises(PipelineError, match="has a trainer already"):
        await second.acquire_async()
    async with acting(config):
        assert units_of(await first.next_batch()) == [0, 1]
    await first.close()


async def test_an_actor_builds_only_what_it_was_set_up_for(
    config: PipelineConfig, store: Store
) -> None:
    asked: list[RolloutRequest] = []

    def accepts(request: RolloutRequest) -> str | None:
        asked.append(request)
        return "it is not mine"

    source = await announced(make_source(config))
    await source.open()
    await source._ask_more()
    for _ in range(3):  # as often as it is started
        with pytest.raises(PipelineError, match=r"leaves its units to others: unit .*not mine"):
            await act(config, accepts=accepts)
    assert asked[0].env == REQUEST.env
    async with acting(config):
        assert units_of(await source.next_batch()) == [0, 1]
    assert source.ledger.dropped == {}
    await source.close()
