"""What goes wrong around a run: no hang, a clear word, and nothing lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from redis.exceptions import ResponseError

from ludic.errors import PipelineError, SchemaVersionError
from ludic.pipeline import LocalRedis, PipelineConfig, TrainerLease
from ludic.pipeline.messages import Group, group_message
from ludic.pipeline.store import Store, entries
from tests.forked import Forked
from tests.pipeline.cut import Line
from tests.pipeline.test_batch_source import acting, announced, units_of, until
from tests.pipeline.world import make_source, server_of

pytestmark = pytest.mark.redis

ROOT = Path(__file__).resolve().parents[2]


def over(server: LocalRedis, patience_s: float = 30.0, call_s: float = 1.0) -> PipelineConfig:
    return PipelineConfig(server.url, "faults", patience_s=patience_s, call_s=call_s)


async def test_a_paused_redis_is_waited_for(own_server: LocalRedis) -> None:
    config = over(own_server)
    source = await announced(make_source(config, lease_s=20.0))
    assert own_server.process is not None
    async with acting(config, lease_s=20.0):
        assert units_of(await source.next_batch()) == [0, 1]
        own_server.process.send_signal(signal.SIGSTOP)
        following = asyncio.create_task(source.next_batch())
        await asyncio.sleep(2.5)
        assert not following.done()
        own_server.process.send_signal(signal.SIGCONT)
        assert units_of(await asyncio.wait_for(following, 60)) == [2, 3]
    await source.close()


async def test_a_redis_that_stays_away_is_an_error_that_names_it(own_server: LocalRedis) -> None:
    config = over(own_server, patience_s=1.0)
    source = await announced(make_source(config))
    own_server.kill()
    with pytest.raises(PipelineError, match=r"waited .* s for Redis at unix:.*redis\.sock"):
        await source.next_batch()
    await source.close()


async def test_a_cut_network_costs_nothing(own_server: LocalRedis) -> None:
    password = urlsplit(own_server.url).password
    line = Line(urlsplit(own_server.url).path)
    config = replace(over(own_server), url=f"redis://:{password}@127.0.0.1:{line.port}")
    try:
        source = await announced(make_source(config, lease_s=20.0))
        async with acting(config, 2, lease_s=20.0):
            seen = []
            for number in range(4):
                if number:
                    line.cut()
                following = asyncio.create_task(source.next_batch())
                await asyncio.sleep(0.5)
                line.mend()
                seen.append(units_of(await asyncio.wait_for(following, 60)))
        assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
        await source.close()
    finally:
        line.close()


async def test_a_full_redis_says_so_and_goes_on_when_there_is_room(own_server: LocalRedis) -> None:
    config = over(own_server)
    source = await announced(make_source(config, lease_s=20.0))
    store = Store(config)
    await source.open()
    await source._ask_more()
    ((entry, number, _),) = _taken(store, 1)
    server_of(store).config_set("maxmemory", "100kb")
    impatient = Store(replace(config, patience_s=0.3))
    with pytest.raises(PipelineError, match="its memory is full"):
        impatient.run("append", "by-hand", entry, number, b"group", 0)
    facts = store.facts()
    assert (facts["groups"], facts["requests"]) == (0, 4), "all of the script, or none of it"
    store.run("leave", "by-hand")
    async with acting(config, lease_s=20.0):
        following = asyncio.create_task(source.next_batch())
        await asyncio.sleep(1.0)
        assert not following.done()
        server_of(store).config_set("maxmemory", "0")
        assert units_of(await asyncio.wait_for(following, 60)) == [0, 1]
    await source.close()
    store.close()


@pytest.mark.parametrize(
    ("maxmemory", "policy", "warns"),
    [("100mb", "allkeys-lru", True), ("0", "allkeys-lru", False), ("100mb", "noeviction", False)],
)
def test_a_trainer_warns_of_a_redis_that_drops_keys_when_it_is_full(
    own_server: LocalRedis,
    caplog: pytest.LogCaptureFixture,
    maxmemory: str,
    policy: str,
    warns: bool,
) -> None:
    lease = TrainerLease(over(own_server))
    server = server_of(lease.store)
    server.config_set("maxmemory", maxmemory)
    server.config_set("maxmemory-policy", policy)
    lease.acquire()
    lease.close()
    assert ("maxmemory-policy allkeys-lru" in caplog.text) == warns


@pytest.mark.parametrize(
    "wording",
    [
        "OOM command not allowed when used memory > 'maxmemory'.",
        "Error running script (call to f_f389ba74): @user_script:13: @user_script: 13: -OOM "
        "command not allowed when used memory > 'maxmemory'.",
    ],
)
def test_a_full_redis_is_known_by_the_words_of_each_version(
    config: PipelineConfig, wording: str
) -> None:
    def refused() -> None:
        raise ResponseError(wording)

    with pytest.raises(PipelineError, match=r"waited .* its memory is full"):
        Store(config).patiently(refused, "append", patience_s=0.0)


async def test_a_damaged_group_is_counted_and_its_prompt_is_sampled_again(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    await source.open()
    await source._ask_more()
    ((entry, number, _),) = _taken(store, 1)
    assert store.run("append", "by-hand", entry, number, b"\x93noise", 0) == b"ok"
    async with acting(config):
        batch = await source.next_batch()
    assert source.ledger.dropped == {"damaged": 1}
    assert units_of(batch) == [1, 2]
    put_back = [n for n, asked in source.ledger.outstanding.items() if asked.of == 0]
    waiting = [asked for asked in source.ledger.waiting if asked.of == 0]
    assert len(put_back) + len(waiting) == 1
    await source.close()


def _taken(store: Store, count: int) -> list[tuple[str, int, bytes]]:
    return entries(store.run("take", "by-hand", count, 60_000, "0-0")[1])


async def test_a_group_of_a_newer_schema_stops_the_trainer_and_stays(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    await source.open()
    await source._ask_more()
    ((entry, number, _),) = _taken(store, 1)
    fields = msgspec.msgpack.decode(group_message(Group(number, ())))
    newer = msgspec.msgpack.encode([99, *fields[1:]])
    assert store.run("append", "by-hand", entry, number, newer, 0) == b"ok"
    with pytest.raises(SchemaVersionError, match="same version for actors and trainer"):
        await source.next_batch()
    await source.close()
    assert store.facts()["groups"] == 1


async def test_a_unit_of_a_newer_schema_stops_the_actor_and_stays(
    config: PipelineConfig, store: Store
) -> None:
    lease = TrainerLease(config, lease_s=20.0)
    lease.acquire()
    lease.announce(0)
    lease.run("ask", "new", 0, "", msgspec.msgpack.encode([99, "unit", 0, b"", b""]))
    with pytest.raises(SchemaVersionError):
        async with acting(config) as tasks:
            await asyncio.wait(tasks, timeout=30)
    assert store.facts()["requests"] == 1
    lease.close()


async def test_a_damaged_request_is_refused_and_accounted_for(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    await source.open()
    source.ledger.waiting += await source._feed.draw()
    source.ledger.number(source.ledger.waiting.pop(0))
    await source.lease.run_async("ask", "new", 0, "", b"noise")
    async with acting(config):
        batch = await source.next_batch()
    assert source.ledger.dropped == {"refused": 1}
    assert units_of(batch) == [1, 2]
    await source.close()


async def test_a_wrong_password_is_refused_at_once(server: LocalRedis) -> None:
    path = urlsplit(server.url).path
    wrong = PipelineConfig(f"unix://:wrong@{path}", "faults", patience_s=60.0)
    for open_it in (TrainerLease(wrong).acquire, lambda: Store(wrong).run("beat", "a", "{}")):
        with pytest.raises(PipelineError, match="refuses this user") as caught:
            open_it()
        assert "wrong@" not in str(caught.value)


LATE = """
import sys, time
real = time.time
time.time = lambda: real() + 3600
import asyncio
from ludic.pipeline import PipelineConfig
from tests.pipeline.world import act
asyncio.run(act(PipelineConfig(sys.argv[1], sys.argv[2]), name="late"))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    """Another Python, which imports what this one does."""
    paths = f"{ROOT / 'src'}:{ROOT}"
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


async def test_an_actor_with_a_clock_an_hour_off_works_like_any_other(
    config: PipelineConfig, store: Store, tmp_path: Path
) -> None:
    source = await announced(make_source(config, lease_s=20.0, wait_s=110.0))
    (tmp_path / "late.py").write_text(LATE)
    actor = Forked(tmp_path / "late.py", config.url, config.run, where=ROOT)
    try:
        assert units_of(await source.next_batch()) == [0, 1]
        facts = store.facts()
        at = int(facts["actors"]["late"].partition(" ")[0])
        assert abs(facts["now_ms"] - at) < 60_000, "its age is by the server's clock"
    finally:
        await source.close("the test is over")
        actor.kill()
        actor.communicate(timeout=60)


async def test_an_actor_that_leaves_finishes_what_it_has_begun(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    await source.open()
    await source._ask_more()
    async with acting(config, latency_s=0.3) as tasks:
        await until(lambda: store.facts()["leased"] == 4)
    assert tasks[0].result().groups == 4
    facts = store.facts()
    assert (facts["groups"], facts["leased"], facts["actors"]) == (4, 0, {})
    await source.close()


async def test_actors_leave_when_the_run_has_ended(config: PipelineConfig, store: Store) -> None:
    source = await announced(make_source(config))
    async with acting(config) as tasks:
        await source.next_batch()
        await source.close("its updates are done")
        await asyncio.wait(tasks, timeout=30)
        assert tasks[0].result().why == "the run has ended: its updates are done"


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_kills_lose_nothing_and_train_on_nothing_twice(tmp_path: Path) -> None:
    command = ["-m", "tests.pipeline.chaos", "--kills", "5", "--drop-kills", "2", "--groups", "24"]
    chaos = start(*command, "--folder", str(tmp_path / "chaos"))
    output, _ = chaos.communicate(timeout=880)
    assert chaos.returncode == 0, output
    found = json.loads(output.splitlines()[-1])
    assert (found["groups"], found["kills"], found["lost"], found["doubled"]) == (24, 5, 0, 0)
    assert found["same_weights"]
    drops = found["drops"]
    assert (drops["kills"], drops["lost"], drops["doubled"]) == (2, 0, 0)
    assert (drops["lost_prompts"], drops["doubled_prompts"]) == (0, 0)
    assert sum(drops["dropped"].values()) > 0
