"""Episodes that cannot be sent, and how many an actor plays at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from secrets import token_hex
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from ludic.envs import LudicEnv
from ludic.errors import PipelineError, RolloutError
from ludic.interaction.base import InteractionProtocol, RunSpec, Runtime
from ludic.interaction.factories import single_agent_protocol
from ludic.pipeline import (
    ActorConfig,
    LocalRedis,
    PipelineConfig,
    messages,
    only,
    run_pipeline_actor,
)
from ludic.pipeline.messages import Unit, unit_message
from ludic.pipeline.store import RefusedError, Store
from ludic.rollouts import RolloutEngine
from ludic.types import Rollout
from tests.pipeline.test_batch_source import acting, announced, units_of, until
from tests.pipeline.world import ENVS, REQUEST, make_client, make_source, server_of

pytestmark = pytest.mark.redis

Note = Callable[[str], dict[str, Any]]


class Noting(InteractionProtocol):
    """Plays as one agent does, and records what `note` says of the episode's id."""

    def __init__(self, inner: InteractionProtocol, note: Note) -> None:
        self.inner, self.note = inner, note

    async def run(self, env: LudicEnv[Any, Any, Any], spec: RunSpec) -> list[Rollout]:
        rollouts = await self.inner.run(env, spec)
        return [rollout.labelled(meta=self.note(spec.episode_id)) for rollout in rollouts]


def noting(note: Note) -> dict[str, Any]:
    """What an actor plays with whose protocol is `Noting`."""
    client, template = make_client(latency_s=0.02)
    runtime = Runtime(client, template, "scripted")

    def protocol(runtime: Runtime, **options: Any) -> Noting:
        return Noting(single_agent_protocol(runtime, **options), note)

    engine = RolloutEngine(ENVS, {"single_agent": protocol}, runtime=runtime, seed=7)
    return {"engine": engine, "client": client}


class Kept(list[Rollout]):
    write = list.append


TOO_LONG = r"a group of [\d,]+ bytes is over the limit of 1,000,000"


@pytest.mark.parametrize(
    ("secret", "where", "failed", "cause"),
    [
        (object(), "unit-0/2/", 1, r"\['secret'\]: object .*, which JSON does not have"),
        ("x" * 2**20, "unit-0/2/", 1, TOO_LONG),
        ("x" * 2**19, "unit-0/", 4, TOO_LONG),
    ],
    ids=["an object", "too long", "too long together"],
)
async def test_what_cannot_be_sent_costs_its_episode_and_no_actor(
    config: PipelineConfig,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    secret: Any,
    where: str,
    failed: int,
    cause: str,
) -> None:
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 1_000_000)
    kept = Kept()
    source = await announced(make_source(config, writer=kept))
    playing = noting(lambda episode: {"secret": secret} if episode.startswith(where) else {})
    async with acting(config, 2, **playing):  # an actor that ends early ends the test
        first, second = await source.next_batch(), await source.next_batch()
    assert (units_of(first), units_of(second)) == ([1], [2, 3])
    assert (source.ledger.trained, source.ledger.dropped) == (4, {})
    assert len({r.episode_id for r in kept}) == len(kept) == 16
    errors = {r.episode_id: r.error for r in kept if r.error is not None}
    assert len(errors) == failed == first.meta["failed_episodes"]
    for episode, error in errors.items():
        assert episode.startswith(where)
        assert re.fullmatch(f"what it recorded cannot be sent: .*{cause}.*", error)
    named = rf"{failed} of a batch's 8 .*: unit 0 \(environment 'guess', seed \d+\), "
    assert re.search(named + "played by .*: what it recorded", caplog.text)
    await source.close()


@pytest.mark.parametrize("limit", ["proto-max-bulk-len", "client-query-buffer-limit"])
async def test_a_record_that_redis_refuses_costs_its_unit_and_no_actor(
    own_server: LocalRedis,
    limit: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ludic.pipeline.store._BREAKING_S", 0.2)
    config = PipelineConfig(own_server.url, "refused", patience_s=30.0)
    server_of(Store(config)).config_set(limit, "1mb")
    kept, long = Kept(), token_hex(3 * 2**19)  # compressed, half of it
    source = await announced(make_source(config, writer=kept, lease_s=20.0))
    playing = noting(lambda episode: {"long": long} if episode.startswith("unit-0/2/") else {})
    async with acting(config, 2, **playing):
        first, second = await source.next_batch(), await source.next_batch()
    assert (units_of(first), units_of(second)) == ([1], [2, 3])
    failed = {r.episode_id: r.error for r in kept if r.error is not None}
    assert {episode.partition("/")[0] for episode in failed} == {"unit-0"}
    assert len(failed) == 4 == first.meta["failed_episodes"]
    said = r"what it recorded cannot be sent: RefusedError: Redis at unix:.* (breaks off|cannot do)"
    assert all(re.match(said, error) for error in failed.values())
    named = r"4 of a batch's 8 .*: unit 0 \(environment 'guess', seed \d+\), played by .*: what it"
    assert re.search(named, caplog.text)
    await source.close()


def broken_off(store: Store, monkeypatch: pytest.MonkeyPatch, pings: list[bool]) -> list[bytes]:
    """A store whose server breaks off a request once for each of `pings`, which says whether it
    answers a small one then. Returns the requests that came through."""
    came: list[bytes] = []

    def call(keys: list[str], args: tuple[bytes, ...]) -> bytes:
        if pings:
            raise RedisConnectionError("broken pipe")
        came.extend(args)
        return b"ok"

    monkeypatch.setattr("ludic.pipeline.store._FIRST_WAIT_S", 0.0)
    monkeypatch.setitem(store._scripts, "append", call)
    monkeypatch.setattr(store, "_answers", lambda: pings.pop(0))
    return came


def test_a_line_that_flaps_for_a_moment_costs_no_large_record(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = broken_off(store, monkeypatch, [True] * 12)
    assert store.run("append", b"x" * 2**20) == b"ok"
    assert came == [b"x" * 2**20]


def test_what_a_server_breaks_off_is_too_large_only_if_it_was_there_all_the_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludic.pipeline.store._BREAKING_S", 0.0)
    broken_off(store, monkeypatch, [*[True] * 3, False, *[True] * 3])
    assert store.run("append", b"x" * 2**20) == b"ok"
    broken_off(store, monkeypatch, [*[True] * 3, False, *[True] * 4])
    with pytest.raises(RefusedError, match="breaks off a request of 1,048,576 bytes"):
        store.run("append", b"x" * 2**20)


async def test_what_redis_refuses_for_another_reason_costs_no_episode(
    config: PipelineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    run = Store.run

    def refuse_twice(self: Store, script: str, *args: Any, **options: Any) -> Any:
        if script == "append" and len(refused) < 2:
            refused.append(script)
            raise PipelineError("NOREPLICAS Not enough good replicas to write.")
        return run(self, script, *args, **options)

    monkeypatch.setattr(Store, "run", refuse_twice)
    source = await announced(make_source(config))
    asked = asyncio.create_task(source.next_batch())
    with pytest.raises(PipelineError, match="NOREPLICAS"):
        async with acting(config) as (actor,):
            await asyncio.wait({actor}, timeout=60)
    refused.append("the replicas are back")
    async with acting(config):
        assert (await asyncio.wait_for(asked, 60)).meta["failed_episodes"] == 0
    await source.close()


async def test_when_nothing_can_be_sent_the_trainer_ends_the_run_and_says_why(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    causes = r"5 of the last 5 episodes failed.*\n  4 x unit 0 \(environment 'guess', seed \d+\)"
    async with acting(config, 2, **noting(lambda _: {"secret": object})):
        with pytest.raises(RolloutError, match=causes):
            await source.next_batch()
    await source.close()
    mended = await announced(make_source(config))
    async with acting(config):
        assert (await mended.next_batch()).meta["failed_episodes"] == 0
    await mended.close()


async def test_units_of_any_size_never_bring_more_episodes_than_concurrency(
    config: PipelineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [5, 4, 1, 1, 9, 2, 5, 1, 1, 4]
    source = await announced(make_source(config))
    units = [Unit(n, (REQUEST,) * size, f"unit-{n}", 2) for n, size in enumerate(sizes)]
    rows = [value for unit in units for value in (unit.number, "", unit_message(unit))]
    await source.lease.run_async("ask", "new", *rows)
    playing: list[int] = [0]
    run = Noting.run

    async def counted(*args: Any) -> list[Rollout]:
        playing.append(playing[-1] + 1)
        try:
            return await run(*args)
        finally:
            playing.append(playing[-1] - 1)

    monkeypatch.setattr(Noting, "run", counted)
    stop, options = asyncio.Event(), noting(lambda _: {})
    actor = run_pipeline_actor(
        config, accepts=only([REQUEST]), cfg=ActorConfig(concurrency=6), stop=stop, **options
    )
    acts = asyncio.create_task(actor)
    await until(lambda: acts.done() or store.facts()["groups"] == len(sizes), 60)
    stop.set()
    report = await asyncio.wait_for(acts, 60)
    assert (report.groups, report.episodes) == (len(sizes), sum(sizes))
    assert max(playing) == 6
    await source.close()
