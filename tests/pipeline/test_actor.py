"""How an actor fills its places, and how it sends what is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ludic.pipeline import PipelineConfig
from ludic.pipeline.store import Store
from ludic.rollouts import RolloutEngine
from ludic.rollouts.engine import Progress
from ludic.types import Rollout
from tests.pipeline.test_batch_source import announced, units_of
from tests.pipeline.world import ENVS, GROUP_SIZE, act, make_engine, make_source

pytestmark = pytest.mark.redis


class Watched(RolloutEngine):
    """Has half of a unit's episodes end at once, and the others when the test says so."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(ENVS, runtime=runtime, seed=7)
        self.begun: list[str] = []
        self.ended = 0
        self.news, self.may_end = asyncio.Condition(), asyncio.Event()

    async def generate_rollouts(self, *args: Any, **options: Any) -> list[Rollout]:
        options.pop("on_progress")(Progress(GROUP_SIZE, GROUP_SIZE // 2))
        self.begun.append(options["prefix"])
        await self.tell()
        await self.may_end.wait()
        rollouts = await super().generate_rollouts(*args, **options)
        self.ended += 1
        await self.tell()
        return rollouts

    async def tell(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30), self.news:
            await self.news.wait_for(holds)


async def test_places_of_episodes_that_ended_are_filled_before_their_unit_is_whole(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config, groups_per_update=8, max_lag=0))
    scripted, client = make_engine()
    engine, stop = Watched(scripted.runtime), asyncio.Event()
    actor = asyncio.create_task(act(config, stop=stop, engine=engine, client=client))
    batch = asyncio.create_task(source.next_batch())
    await engine.until(lambda: len(engine.begun) == 7)  # of 16 places, 14 are taken now
    assert engine.ended == 0
    engine.may_end.set()
    assert units_of(await batch) == list(range(8))
    stop.set()
    assert (await asyncio.wait_for(actor, 30)).groups == 8
    await source.close()


async def test_groups_that_are_ready_together_are_sent_in_one_call(
    config: PipelineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await announced(make_source(config, groups_per_update=4, max_lag=0))
    scripted, client = make_engine()
    engine, stop, run_async = Watched(scripted.runtime), asyncio.Event(), Store.run_async
    engine.may_end.set()
    sent: list[int] = []

    async def patient(self: Store, script: str, *args: Any, **options: Any) -> Any:
        if script == "append":
            sent.append(len(args) // 4)
            await engine.until(lambda: engine.ended == 4)
        return await run_async(self, script, *args, **options)

    monkeypatch.setattr(Store, "run_async", patient)
    actor = asyncio.create_task(act(config, stop=stop, engine=engine, client=client))
    assert units_of(await source.next_batch()) == list(range(4))
    assert (len(sent), sum(sent)) == (2, 4)
    stop.set()
    report = await asyncio.wait_for(actor, 30)
    assert (report.groups, report.episodes, report.refused) == (4, 4 * GROUP_SIZE, {})
    await source.close()
