"""The trainer's intake, from reading Redis to a batch, and what Redis takes: on one core.

    python -m benchmarks.intake [--groups 64] [--repeats 5] [--actors 64] [--profile]

Intake: a Redis holds batches of `--groups` groups of 8 episodes, of 1 and of 4 turns, with 256
sampled tokens a turn, written as actors write them. A trainer pinned to one core makes batches of
them; its processor time and the clock are read, less those of the writers, who were done before.
`tokens_per_s` is by the clock, `tokens_per_cpu_s` by processor time, and `core_share` what the
trainer got of its core: the Redis server, which may have to use the same one, and whatever else the
machine does, have the rest. `line_us` is what a rollout's line in the run's log takes on top, where
a run keeps rollouts. Nothing is sampled from a model or trained on. `batch` is the same without
Redis: from rollouts as an in-process run has them to the batch.

Redis: `--actors` writers, each a thread with a connection and heartbeats of its own, in one other
process, send groups as fast as they can, and a trainer reads and acknowledges them. What the server
counts is read twice: while the writers wait for work, and while they are busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from redis import Redis

from ludic.pipeline import Bounds, LocalRedis, PipelineBatchSource, PipelineConfig, TrainerLease
from ludic.pipeline.messages import Group, Unit, group_message, read_group, read_unit
from ludic.pipeline.store import Store, entries
from ludic.rollouts import EnvSpec, FixedMix, ProtocolSpec, RolloutRequest
from ludic.rollouts.storage import rollout_line
from ludic.saw.building import batch_from_rollouts
from ludic.training import make_grpo
from ludic.types import AgentStep, EnvironmentStep, FinishReason, Rollout, TokenTrace, VersionSpan

NEEDS = ("redis",)

REQUEST = RolloutRequest(EnvSpec("long_talk", {}), ProtocolSpec("single_agent", {"parser": "text"}))
SAMPLING = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0},
    **{"frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": [], "stop_token_ids": []},
    **{"seed": 6719038401494632729, "max_tokens": 256},
}
GROUP, TOKENS, PROMPT, BETWEEN, VOCABULARY = 8, 256, 200, 50, 150_000
LEASE_MS = 600_000


def make_rollouts(unit: Unit, turns: int) -> tuple[Rollout, ...]:
    """A unit's rollouts: dialogues of random ids, whose prompts extend each other."""
    noise = np.random.default_rng(unit.number)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(noise.integers(0, VOCABULARY, count).tolist())

    first, rollouts = ids(PROMPT), []
    for position, request in enumerate(unit.requests):
        prompt, steps = first, list[AgentStep | EnvironmentStep]()
        for turn in range(turns):
            text = "".join(map(chr, 97 + noise.integers(0, 26, 4 * TOKENS)))
            logprobs = (-noise.exponential(size=TOKENS)).astype(np.float32).tolist()
            trace = TokenTrace(prompt, ids(TOKENS), tuple(logprobs), (VersionSpan(0, TOKENS, 0),))
            new: Any = ({"role": "user", "content": "Go on." * 30},)
            answer: Any = {"role": "assistant", "content": text}
            steps += [
                AgentStep(turn, new, answer, FinishReason.STOP, trace, sampling=SAMPLING),
                EnvironmentStep(
                    *(turn, (2 * turn,), "Go on." * 30, text, "Go on." * 30),
                    reward=float(noise.integers(0, 2)),
                    terminated=turn == turns - 1,
                    reward_components={"env": 1.0, "parser": 0.0},
                ),
            ]
            prompt = (*trace.token_ids, *ids(BETWEEN))
        episode = f"{unit.prefix}/{position}/0"
        rollouts.append(
            Rollout(
                *(f"{episode}/agent", tuple(steps), "agent", episode, request.group_id),
                env=request.env,
                protocol=request.protocol,
                env_seed=1,
                sampling_seed=2,
                meta={"max_steps": 100},
            )
        )
    return tuple(rollouts)


def write_groups(store: Store, name: str, make: Callable[[Unit], bytes], count: int) -> int:
    """Takes units and appends their groups, up to `count` of them; returns how many it did."""
    taken = entries(store.run("take", name, count, LEASE_MS, "0-0")[1])
    for entry, number, message in taken:
        store.run("append", name, entry, number, make(read_unit(message)), TOKENS * GROUP)
    return len(taken)


def make_source(config: PipelineConfig, groups: int, batches: int) -> PipelineBatchSource:
    return PipelineBatchSource(
        lease=TrainerLease(config),
        request_fn=FixedMix({"one": (REQUEST, 1.0)}),
        algorithm=make_grpo(group_size=GROUP),
        rollouts_per_update=GROUP * groups,
        max_lag=1000,
        stale="correct",
        in_order=False,
        bounds=Bounds(groups * batches, 2**40),
    )


async def measure_intake(
    redis: LocalRedis, turns: int, groups: int, repeats: int, profile: bool
) -> dict[str, float]:
    """One batch to warm up, then `repeats` batches that are all in Redis when the clock starts."""
    config = PipelineConfig(redis.url, f"intake-{turns}")
    source, store = make_source(config, groups, 1 + repeats), Store(config)
    sizes: list[int] = []
    encoding, group = 0.0, b""

    def make(unit: Unit) -> bytes:
        nonlocal encoding, group
        rollouts = make_rollouts(unit, turns)
        began = time.thread_time()
        group = group_message(Group(unit.number, rollouts, "writer"))
        encoding += time.thread_time() - began
        sizes.append(len(group))
        return group

    def fill(count: int) -> None:
        while count:
            written = write_groups(store, "writer", make, count)
            count -= written
            if not written:
                time.sleep(0.02)

    await source.lease.acquire_async()
    await asyncio.to_thread(source.lease.announce, 0)
    await asyncio.gather(source.next_batch(), asyncio.to_thread(fill, groups))
    await asyncio.to_thread(fill, groups * repeats)
    record = _profiler() if profile else None
    # Over all of them: one reading may bring the groups of several batches.
    cpu, wall, tokens = time.process_time(), time.perf_counter(), 0
    for _ in range(repeats):
        tokens += (await source.next_batch()).counts.tokens
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if record is not None:
        record()
    await source.close()
    store.forget()
    store.close()
    if tokens != repeats * groups * GROUP * turns * TOKENS:
        raise RuntimeError(f"{repeats} batches have {tokens} tokens, which is not all of them")
    return {
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "core_share": cpu / wall,
        "us_per_rollout": cpu / (repeats * groups * GROUP) * 1e6,
        "bytes_per_token": sum(sizes) / len(sizes) / (GROUP * turns * TOKENS),
        "encoded_tokens_per_cpu_s": len(sizes) * GROUP * turns * TOKENS / encoding,
        "line_us": line_seconds(group) * 1e6,
    }


def line_seconds(message: bytes) -> float:
    """Processor time for the log's line of one rollout, as it was read from Redis."""
    seconds = []
    for rollout in read_group(message).rollouts * 4:
        began = time.thread_time()
        rollout_line(rollout)
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


def measure_batches(turns: int, groups: int, repeats: int) -> float:
    """Sampled tokens per second of processor time, from rollouts in memory to a batch."""
    requests = tuple([RolloutRequest(REQUEST.env, REQUEST.protocol)] * GROUP)
    rollouts = [
        rollout.labelled(group_id=str(number))
        for number in range(groups)
        for rollout in make_rollouts(Unit(number, requests, f"unit-{number}", 100), turns)
    ]
    credit = make_grpo(group_size=GROUP).credit_assigner
    cpus = []
    for _ in range(1 + repeats):
        began = time.process_time()
        batch = batch_from_rollouts(rollouts, credit)
        cpus.append(time.process_time() - began)
    return batch.counts.tokens / statistics.median(cpus[1:])


def act_as_many(config: PipelineConfig, actors: int, over: Any) -> None:
    """In a process of its own: each writer has a connection, and asks and beats as actors do."""
    requests = tuple([REQUEST] * GROUP)
    prepared = make_rollouts(Unit(0, requests, "unit-0", 100), 1)

    def make(unit: Unit) -> bytes:
        pairs = enumerate(zip(prepared, unit.requests, strict=True))
        rollouts = tuple(
            rollout.labelled(
                id=f"{unit.prefix}/{at}/0/agent",
                episode_id=f"{unit.prefix}/{at}/0",
                group_id=request.group_id,
            )
            for at, (rollout, request) in pairs
        )
        return group_message(Group(unit.number, rollouts, "writer"))

    def act(name: str) -> None:
        store, beat, pause = Store(config), 0.0, 0.02
        while not over.is_set():
            if time.monotonic() - beat > 0.5:
                store.run("beat", name, json.dumps({"groups": 0, "busy": 0}))
                beat = time.monotonic()
            if write_groups(store, name, make, 1):
                pause = 0.02
                continue
            time.sleep(pause)
            pause = min(1.5 * pause, 0.3)
        store.close()

    threads = [threading.Thread(target=act, args=(f"actor-{n}",)) for n in range(actors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


async def measure_redis(redis: LocalRedis, actors: int, groups: int, seconds: float) -> Any:
    """What the server does for `actors` that wait for work, and for as many that are busy."""
    config = PipelineConfig(redis.url, f"redis-{actors}")
    source = make_source(config, groups, 8)
    await source.lease.acquire_async()
    await asyncio.to_thread(source.lease.announce, 0)
    spawn = multiprocessing.get_context("spawn")
    over = spawn.Event()
    writers = spawn.Process(target=act_as_many, args=(config, actors, over), daemon=True)
    writers.start()
    try:
        deadline = time.monotonic() + 120
        while len(source.lease.store.facts()["actors"]) < actors:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the {actors} writers did not start within 120 s")
            await asyncio.sleep(0.2)
        meter = Meter(redis)
        await asyncio.sleep(seconds / 2)
        waiting = meter.read()
        await source.next_batch()
        meter, began, batches, memory = Meter(redis), time.perf_counter(), 0, [0]
        while time.perf_counter() - began < seconds:
            await source.next_batch()
            await asyncio.to_thread(source.committed, source.state_dict())
            memory.append(await asyncio.to_thread(source.lease.store.memory))
            batches += 1
        busy = meter.read()
    finally:
        over.set()
        writers.join(60)
        writers.kill()
    await source.close()
    store = Store(config)
    store.forget()
    store.close()
    done = batches * groups
    tokens = done * GROUP * TOKENS
    cpu = busy["cpu"] * busy["seconds"]
    return {
        "waiting_commands_per_s": waiting["commands"],
        "waiting_cpu_share": waiting["cpu"],
        "groups_per_s": done / busy["seconds"],
        "tokens_per_s": tokens / busy["seconds"],
        "commands_per_s": busy["commands"],
        "received_bytes_per_s": busy["received"],
        "sent_bytes_per_s": busy["sent"],
        "received_bytes_per_token": busy["received"] * busy["seconds"] / tokens,
        "cpu_share": busy["cpu"],
        "tokens_per_cpu_s": tokens / cpu,
        "memory_mib": max(memory) / 2**20,
    }


class Meter:
    """Reads what a server counts: each figure is per second since the meter was made."""

    NAMES: Mapping[str, tuple[str, ...]] = {
        "commands": ("total_commands_processed",),
        "received": ("total_net_input_bytes",),
        "sent": ("total_net_output_bytes",),
        "cpu": ("used_cpu_user", "used_cpu_sys"),
    }

    def __init__(self, redis: LocalRedis) -> None:
        self._redis = Redis.from_url(redis.url)
        self._before: Any = self._redis.info()
        self._began = time.perf_counter()

    def read(self) -> dict[str, float]:
        now: Any = self._redis.info()
        seconds = time.perf_counter() - self._began
        self._redis.close()
        return {"seconds": seconds} | {
            name: sum(float(now[field]) - float(self._before[field]) for field in fields) / seconds
            for name, fields in self.NAMES.items()
        }


def _profiler() -> Callable[[], None]:
    """Starts a profile, by processor time, and has this thread do what others would; returns what
    ends and prints it."""
    import cProfile
    import pstats

    async def here(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return call(*args, **options)

    in_thread, recorder = asyncio.to_thread, cProfile.Profile(time.thread_time)
    asyncio.to_thread = here  # type: ignore[assignment]
    recorder.enable()

    def end() -> None:
        recorder.disable()
        asyncio.to_thread = in_thread
        pstats.Stats(recorder).sort_stats("tottime").print_stats(25)

    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=64, help="groups of a batch")
    parser.add_argument("--repeats", type=int, default=5, help="batches that are measured")
    parser.add_argument("--turns", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--actors", type=int, default=64, help="writers; 0: leave Redis out")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long they write")
    parser.add_argument("--profile", action="store_true", help="print where the intake's time goes")
    args = parser.parse_args()
    figures: dict[str, Any] = {"benchmark": "intake", "by_turns": {}}
    folder = tempfile.TemporaryDirectory(prefix="ludic-bench-")
    with folder, LocalRedis(Path(folder.name)) as redis:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
        if cores:
            os.sched_setaffinity(0, {min(cores)})
        for turns in args.turns:
            found = asyncio.run(
                measure_intake(redis, turns, args.groups, args.repeats, args.profile)
            )
            found["batch_tokens_per_cpu_s"] = measure_batches(turns, args.groups, args.repeats)
            figures["by_turns"][turns] = {k: round(v, 2) for k, v in found.items()}
            print(f"{turns} turns:", figures["by_turns"][turns], flush=True)
        if cores:
            os.sched_setaffinity(0, cores)
        if args.actors:
            found = asyncio.run(measure_redis(redis, args.actors, 16, args.seconds))
            figures["redis"] = {k: round(v, 2) for k, v in found.items()}
            print(f"{args.actors} actors:", figures["redis"], flush=True)
    rows = sorted(figures["by_turns"].values(), key=lambda row: row["tokens_per_cpu_s"])
    names = ("tokens_per_s", "tokens_per_cpu_s", "core_share")
    print(json.dumps({name: row[name] for row in rows[:1] for name in names} | figures))


if __name__ == "__main__":
    main()
