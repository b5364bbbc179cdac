"""Units whose episodes fail cost no actor: the trainer alone judges how many are too many."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from ludic.errors import RolloutError
from ludic.interaction.base import Runtime
from ludic.pipeline import PipelineConfig
from ludic.pipeline.messages import Group
from ludic.pipeline.reading import FailureMonitor, count_failures
from ludic.pipeline.store import Store
from ludic.plumbing.text import TRACEBACK
from ludic.rollouts import RolloutEngine
from ludic.types import EnvSpec, Info, Obs, Rollout
from tests.pipeline import world
from tests.pipeline.test_batch_source import acting, announced, units_of
from tests.pipeline.world import act, make_client, make_source
from tests.rollouts.worlds import GuessEnv

pytestmark = pytest.mark.redis


def playing(fails: Callable[[int | None], bool]) -> dict[str, Any]:
    """What an actor plays with whose environment raises for the seeds of which `fails` is true."""

    class Failing(GuessEnv):
        def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
            if fails(seed):
                raise ValueError("this level has no door")
            return super().env_reset(seed=seed)

    client, template = make_client()
    runtime = Runtime(client, template, "scripted")
    return {"engine": RolloutEngine({"guess": Failing}, runtime=runtime, seed=7), "client": client}


class Kept(list[Rollout]):
    write = list.append


async def test_a_unit_whose_environment_always_raises_costs_its_episodes_and_no_actor(
    config: PipelineConfig,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "GROUP_SIZE", 8)
    kept = Kept()
    source = await announced(make_source(config, writer=kept, groups_per_update=4))
    await source.open()
    await source._ask_more()
    unlucky = source._unit(0).requests[0].env_seed
    async with acting(config, 2, **playing(lambda seed: seed == unlucky)) as actors:
        first, second = await source.next_batch(), await source.next_batch()
        assert not any(actor.done() for actor in actors)
    assert (units_of(first), units_of(second)) == ([1, 2, 3], [4, 5, 6, 7])
    assert (first.meta["failed_episodes"], source.ledger.trained) == (8, 8)
    failed = [r for r in kept if r.error is not None]
    assert {r.episode_id.partition("/")[0] for r in failed} == {"unit-0"}
    assert all("this level has no door" in str(r.error) for r in failed)
    named = rf"unit 0 \(environment 'guess', seed {unlucky}\), played by .*: .*this level"
    assert re.search(rf"8 of a batch's 32 episodes failed: {named}", caplog.text)
    await source.close()


async def test_an_actor_that_fails_at_everything_ends_the_run_by_the_trainers_judgement(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    named = r"unit 0 \(environment 'guess', seed \d+\), played by .*: .*this level has no door"
    async with acting(config, **playing(lambda _: True)) as (actor,):
        with pytest.raises(RolloutError, match=rf"5 of the last 5 .*\n  4 x {named}") as caught:
            await asyncio.wait_for(source.next_batch(), 60)
        assert not actor.done()
        assert "in env_reset" in str(caught.value.__notes__)
    await source.close()


async def test_an_actor_on_a_broken_machine_ends_and_the_others_go_on(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config, groups_per_update=12, max_failure_rate=0.9))
    await source.open()
    await source._ask_more()
    with pytest.raises(RolloutError, match=r"have failed, those of unit .* this level has no door"):
        await asyncio.wait_for(act(config, concurrency=4, **playing(lambda _: True)), 60)
    async with acting(config, **playing(lambda _: False)) as (healthy,):
        batch = await asyncio.wait_for(source.next_batch(), 60)
        assert not healthy.done()
    # Those that were on their way when the eighth was judged are failures, too.
    assert 8 * world.GROUP_SIZE <= batch.meta["failed_episodes"] < 12 * world.GROUP_SIZE
    await source.close()


def played(number: int, failed: int, why: str) -> Group:
    """A group of eight episodes, of which some failed in the same way."""
    return Group(
        number,
        tuple(
            Rollout(
                f"unit-{number}/{i}/agent",
                (),
                episode_id=f"unit-{number}/{i}",
                env=EnvSpec("guess"),
                env_seed=number,
                error=f"EnvError: {why}" if i < failed else None,
                meta={TRACEBACK: f"the traceback of {why}"} if i < failed else {},
            )
            for i in range(8)
        ),
        "an actor",
    )


def test_a_run_with_flaky_episodes_logs_little_and_still_ends_with_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = FailureMonitor(0.5)
    for first in range(0, 256, 64):
        units = range(first, first + 64)
        count_failures(monitor, [played(n, n % 4 == 0, "no answer in time") for n in units])
        assert [record.args for record in caplog.records][-1:] == [(11,)]
        assert len(caplog.records) == 6
        caplog.clear()
    with pytest.raises(RolloutError, match="EnvError: this level has no door") as caught:
        count_failures(monitor, [played(n, 8, "this level has no door") for n in range(256, 320)])
    assert caught.value.__notes__ == ["the traceback of this level has no door"]
