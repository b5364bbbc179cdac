"""Actors and trainer over Redis: groups per second, bytes per token, and what overlapping gains.

    python -m benchmarks.pipeline [--seconds 10] [--updates 12] [--train-s 0.5]

Throughput: 1, 4 and 16 actors, each a process, append groups of 8 episodes with 256 sampled tokens
each as fast as they can; a trainer makes batches of 8 groups of them, and acknowledges each. What
is measured is the way from actor to batch; no model is trained or sampled from.

Overlap: a trainer that takes `--train-s` for an update (its arithmetic, and a pause for the rest),
and a client that takes as long to generate a batch. In one process the two take turns; over Redis
an actor samples while the trainer trains. The limit of the gain is 2.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.scripted_client import ScriptedCall, ScriptedChatClient
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction import Runtime
from ludic.pipeline import (
    ActorConfig,
    Bounds,
    LocalRedis,
    PipelineBatchSource,
    PipelineConfig,
    PipelinePublisher,
    TrainerLease,
    only,
    run_pipeline_actor,
)
from ludic.pipeline.store import Store
from ludic.rollouts import EnvSpec, FixedMix, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.training import RolloutBatchSource, Trainer, TrainerConfig, make_grpo

NEEDS = ("redis",)

REQUEST = RolloutRequest(EnvSpec("one_turn", {}), ProtocolSpec("single_agent", {"parser": "text"}))
GROUP, GROUPS, TOKENS = 8, 8, 256
_fork = multiprocessing.get_context("fork")


def make_env() -> Any:
    from ludic.envs import SingleAgentEnv
    from ludic.types import StepOutcome

    class OneTurn(SingleAgentEnv):
        """Asks once, and pays by the answer's first letter."""

        blocking = False

        def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return "Say something.", {}

        def env_step(self, action: str) -> StepOutcome:
            return StepOutcome("", float(ord(action[0]) % 2), terminated=True)

        def env_current_obs(self) -> str:
            return ""

    return OneTurn()


COUNT = itertools.count()
NOISE = (-np.random.default_rng(0).exponential(size=100_003)).astype(np.float32).tolist()


def reply(call: ScriptedCall) -> str:
    noise = np.random.default_rng(call.request.sampling.seed)
    return "".join(map(chr, 97 + noise.integers(0, 26, TOKENS - 1)))


def logprob(position: int, token: int) -> float:
    found: float = NOISE[(position * 7919 + token * 104_729 + next(COUNT)) % len(NOISE)]
    return found


def make_engine(latency_s: float = 0.0) -> tuple[RolloutEngine, ScriptedChatClient]:
    template = HFChatTemplate(tiny_tokenizer())
    client = ScriptedChatClient(reply, template, logprob=logprob, latency_s=latency_s)
    sampling = InferenceSpec(SamplingConfig(max_tokens=TOKENS))
    runtime = Runtime(client, template, "scripted", sampling)
    return RolloutEngine({"one_turn": make_env}, runtime=runtime), client


def actor_main(config: PipelineConfig, latency_s: float, concurrency: int) -> None:
    engine, client = make_engine(latency_s)
    cfg = ActorConfig(concurrency=concurrency)
    asyncio.run(run_pipeline_actor(config, engine, accepts=only([REQUEST]), client=client, cfg=cfg))


def make_source(
    config: PipelineConfig, groups: int, max_lag: int, stale: Any
) -> PipelineBatchSource:
    return PipelineBatchSource(
        lease=TrainerLease(config),
        request_fn=FixedMix({"one": (REQUEST, 1.0)}),
        algorithm=make_grpo(group_size=GROUP),
        rollouts_per_update=GROUP * groups,
        max_lag=max_lag,
        stale=stale,
        in_order=False,
        bounds=Bounds(64 * groups),
    )


class Actors:
    """Starts actors from a process that has imported everything, and has done nothing else: one
    that has trained cannot be forked safely."""

    def __init__(self) -> None:
        self._line, theirs = _fork.Pipe()
        self._nursery = _fork.Process(target=self._serve, args=(theirs,))
        self._nursery.start()

    @staticmethod
    def _serve(line: Any) -> None:
        children: list[Any] = []
        while True:
            order = line.recv()
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
                child.join(30)
            children = []
            if order is None:
                return
            count, *arguments = order
            for _ in range(count):
                children.append(_fork.Process(target=actor_main, args=arguments))
                children[-1].start()

    def start(self, count: int, config: PipelineConfig, latency_s: float, concurrency: int) -> None:
        """Ends those that are there, and starts `count` others."""
        self._line.send((count, config, latency_s, concurrency))

    def close(self) -> None:
        self._line.send(None)
        self._nursery.join(60)


async def throughput(
    redis: LocalRedis, crew: Actors, actors: int, seconds: float
) -> dict[str, float]:
    config = PipelineConfig(redis.url, f"bench-{actors}")
    crew.start(actors, config, 0.0, 4 * GROUP)
    source = make_source(config, GROUPS, 1000, "correct")
    await source.lease.acquire_async()
    await asyncio.to_thread(source.lease.announce, 0)
    for _ in range(4):  # until every actor is at work
        await source.next_batch()
    began, batches, memory = time.perf_counter(), 0, []
    while time.perf_counter() - began < seconds:
        await source.next_batch()
        await asyncio.to_thread(source.committed, source.state_dict())
        batches += 1
        memory.append(await asyncio.to_thread(source.lease.store.memory))
    elapsed = time.perf_counter() - began
    meta = source.lease.store.facts()["meta"]
    await source.close()
    store = Store(config)
    store.forget()
    store.close()
    return {
        "groups_per_s": batches * GROUPS / elapsed,
        "tokens_per_s": batches * GROUPS * GROUP * TOKENS / elapsed,
        "bytes_per_token": int(meta["sent_bytes"]) / int(meta["tokens"]),
        "redis_mib": statistics.median(memory) / 2**20,
    }


class Paced(Trainer):
    """A trainer whose update takes a given time, most of it a pause."""

    pace_s = 0.0

    async def _run(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = await super()._run(work, *args, **kwargs)
        if getattr(work, "func", None) == self.passes.accumulate:
            await asyncio.sleep(max(self.pace_s - (time.perf_counter() - began), 0))
        return result


async def overlap(
    redis: LocalRedis, crew: Actors, updates: int, train_s: float
) -> dict[str, float]:
    def trainer(source: Any, publisher: Any) -> Paced:
        made = Paced(
            model=tiny_model(hidden_size=32, layers=1),
            batch_source=source,
            publisher=publisher,
            cfg=TrainerConfig(max_seq_len=1024, micro_token_budget=16384),
        )
        made.pace_s = train_s
        return made

    async def timed(made: Paced) -> float:
        await made.train(2)
        began = time.perf_counter()
        await made.train(updates)
        return (time.perf_counter() - began) / updates

    engine, _ = make_engine(train_s)
    together = RolloutBatchSource(
        engine=engine,
        request_fn=FixedMix({"one": (REQUEST, 1.0)}),
        algorithm=make_grpo(group_size=GROUP),
        rollouts_per_update=GROUP,
        concurrency=GROUP,
    )
    sync_s = await timed(trainer(together, None))
    config = PipelineConfig(redis.url, "bench-overlap")
    crew.start(1, config, train_s, GROUP)
    source = make_source(config, 1, 1, "wait")
    made = trainer(source, PipelinePublisher(source.lease))
    async_s = await timed(made)
    await source.close()
    return {"sync_s": sync_s, "async_s": async_s, "async_speedup": sync_s / async_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--train-s", type=float, default=1.0)
    parser.add_argument("--actors", type=int, nargs="*", default=[1, 4, 16])
    args = parser.parse_args()
    found: dict[str, Any] = {"by_actors": {}}
    crew = Actors()
    folder = tempfile.TemporaryDirectory(prefix="ludic-bench-")
    with folder, LocalRedis(Path(folder.name)) as redis, closing(crew):
        gain = asyncio.run(overlap(redis, crew, args.updates, args.train_s))
        print("overlap:", {k: round(v, 3) for k, v in gain.items()}, flush=True)
        for actors in args.actors:
            figures = asyncio.run(throughput(redis, crew, actors, args.seconds))
            found["by_actors"][actors] = {k: round(v, 2) for k, v in figures.items()}
            print(f"{actors} actors:", found["by_actors"][actors], flush=True)
    best = max(found["by_actors"].values(), key=lambda f: f["groups_per_s"])
    figures = {
        "groups_per_s": best["groups_per_s"],
        "bytes_per_token": best["bytes_per_token"],
        "async_speedup": round(gain["async_speedup"], 3),
        "redis_mib": best["redis_mib"],
    }
    print(json.dumps(figures | found))


if __name__ == "__main__":
    main()
