"""New policies come while units go on: nothing but what needs a policy waits for it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from ludic.inference.local.client import LocalChatClient
from ludic.inference.scripted_client import ScriptedCall, ScriptedChatClient
from ludic.interaction.base import Runtime
from ludic.pipeline import ActorConfig, PipelineConfig, only, run_pipeline_actor
from ludic.pipeline.store import Store
from ludic.rollouts import RolloutEngine
from ludic.runs.pipeline.acting import _opened
from ludic.runs.settings import parse_run
from ludic.types import Rollout
from tests.inference.local.asking import request
from tests.pipeline.test_batch_source import announced, units_of, until
from tests.pipeline.world import ENVS, REQUEST, make_client, make_source, seeded_reply

pytestmark = pytest.mark.redis


class Gates:
    """What has happened, and what may."""

    def __init__(self) -> None:
        self.sampling, self.loading, self.loaded = (asyncio.Event() for _ in range(3))
        self.begun: list[str] = []
        self.beginning = defaultdict[str, asyncio.Event](asyncio.Event)


class Loading(ScriptedChatClient):
    """Answers once a second policy comes, which is loaded when the test says so."""

    gates: Gates
    policies = 0

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        self.policies += 1
        if self.policies == 2:
            self.gates.loading.set()
            await self.gates.loaded.wait()
        return await super().sync_weights(params, version=version)


class Noted(RolloutEngine):
    """Notes which units begin."""

    gates: Gates

    async def generate_rollouts(self, *args: Any, **kwargs: Any) -> list[Rollout]:
        prefix = kwargs["prefix"]
        self.gates.begun.append(prefix)
        self.gates.beginning[prefix].set()
        return await super().generate_rollouts(*args, **kwargs)


def start_actor(config: PipelineConfig, gates: Gates, stop: asyncio.Event) -> asyncio.Task[Any]:
    """An actor with room for one unit."""

    async def reply(call: ScriptedCall) -> str:
        gates.sampling.set()
        await gates.loading.wait()
        return seeded_reply(call)

    template = make_client()[1]
    client = Loading(reply, template, logprob=-1.5)
    engine = Noted(ENVS, runtime=Runtime(client, template, "scripted"), seed=7)
    client.gates = engine.gates = gates
    cfg = ActorConfig(concurrency=1, lease_s=10.0)
    return asyncio.create_task(
        run_pipeline_actor(
            config, engine, accepts=only([REQUEST]), client=client, cfg=cfg, stop=stop
        )
    )


async def test_units_that_the_old_policy_is_enough_for_go_on_while_a_new_one_is_loaded(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config, max_lag=1, every=100, wait_s=15.0))
    gates, stop = Gates(), asyncio.Event()
    actor = start_actor(config, gates, stop)
    first = asyncio.create_task(source.next_batch())
    await asyncio.wait_for(gates.sampling.wait(), 15)
    await asyncio.to_thread(source.lease.announce, 1)  # while the first unit is sampled
    batches = [await first, await source.next_batch()]
    # All four units were asked for when there was version 0: none of them waited for version 1.
    assert gates.begun == ["unit-0", "unit-1", "unit-2", "unit-3"]
    assert [units_of(batch) for batch in batches] == [[0, 1], [2, 3]]
    assert not gates.loaded.is_set()
    gates.loaded.set()
    batches.append(await source.next_batch())
    stop.set()
    await asyncio.wait_for(actor, 30)
    await source.close()
    # The units that were asked for since then need version 1, and have it.
    assert units_of(batches[2]) == [4, 5]
    assert [batch.meta["train/pipeline_lag_mean"] for batch in batches] == [1, 1, 0]
    assert all(batch.meta["perf/actor_sample_s"] > 0 for batch in batches)
    load_s = [batch.meta["perf/actor_load_s"] for batch in batches]
    assert load_s[0] == load_s[1] != load_s[2]  # that of the policy which each began with


async def test_the_next_unit_begins_before_the_one_before_it_is_sent(
    config: PipelineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates, stop, run_async = Gates(), asyncio.Event(), Store.run_async
    gates.loading.set()  # replies need not wait

    async def patient(self: Store, script: str, *args: Any, **kwargs: Any) -> Any:
        if script == "append" and args[2] < 2:  # the number of the unit
            await asyncio.wait_for(gates.beginning[f"unit-{args[2] + 1}"].wait(), 15)
        return await run_async(self, script, *args, **kwargs)

    source = await announced(make_source(config, max_lag=1, every=100, wait_s=15.0))
    monkeypatch.setattr(Store, "run_async", patient)
    actor = start_actor(config, gates, stop)
    batch = await source.next_batch()
    assert units_of(batch) == [0, 1]
    monkeypatch.undo()
    stop.set()
    await asyncio.wait_for(actor, 30)
    await source.close()


async def test_what_an_actor_samples_goes_on_under_the_new_weights() -> None:
    tuned = ["inference.max_context_tokens=512", "training.concurrency=1"]
    config = parse_run('[env]\nkind = "tictactoe"\n', tuned)
    async with _opened(config, [], None, None) as (_, client):
        assert isinstance(client, LocalChatClient)
        asked = request([1, 2, 3], max_tokens=400, seed=0, ignore_eos=True)
        weights = {name: tensor.clone() for name, tensor in client._model.named_parameters()}
        under_way = asyncio.create_task(client.complete_tokens(asked))
        await until(lambda: client.stats()["generated_tokens"] > 0)
        await client.sync_weights(weights, version=5)
        assert not under_way.done()  # it was not waited for
        trace = (await under_way).trace
    assert trace is not None
    assert [span.version for span in trace.version_spans] == [0, 5]
