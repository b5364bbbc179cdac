"""Splits of GPUs into trainer and servers, tried by the simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from ludic.errors import OutOfMemoryError
from ludic.inference.vllm.memory import server_need
from ludic.memory.plan import GIB, Plan, settled, with_logits
from ludic.plan.costs import Costs, passes_of
from ludic.plan.simulation import simulate
from ludic.plan.workload import Result, Setup, Workload

Mode = Literal["sync", "ahead", "async"]
Goal = Literal["tokens_per_s", "updates", "cost"]
EPISODES_PER_ACTOR = 64
_SERVER_SHARE = 0.9
"""Of a GPU's memory that a vLLM server takes."""
_TRIED, _PLAYED = 2, 10
"""Updates of a try, and of what is shown."""
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run as a plan sees it. `memory` is what the run itself computes for one device."""

    costs: Costs
    workload: Workload
    memory: Plan
    longest: int
    """The longest sample."""
    budget: int | None = None
    checkpointing: bool | None = None
    slots: int = 256
    context: int = 4096
    hosts: int = 1
    """Processes that play episodes, where sampler and trainer are one process; actors with engines
    of their own where they share the trainer's GPU."""
    threaded: bool = False
    """The environment may block, and so runs in a thread."""
    writes: bool = True
    """Rollouts are written."""
    mode: Mode = "sync"
    lag: int = 1
    in_order: bool = True
    steps: int = 1
    epochs: int = 1
    checkpoint_every: int = 0
    failures_per_gpu_hour: float = 0.0
    seed: int = 0

    @property
    def free(self) -> int:
        return int(self.costs.profile["memory_gib"] * GIB)


@dataclass(frozen=True, slots=True)
class Split:
    """The ranks of a trainer, and servers with a number of GPUs each. Without servers the trainer's
    process samples, too."""

    ranks: int
    servers: int = 0
    gpus_per_server: int = 1

    @property
    def gpus(self) -> int:
        return self.ranks + self.servers * self.gpus_per_server


@dataclass(frozen=True, slots=True)
class Option:
    """A split that fits, and what came out of it."""

    split: Split
    trainer: Plan
    taken: int
    """What a rank is expected to take; the plan's total is the most."""
    server_bytes: int
    actors: int
    result: Result
    limit: str


def trainer_plan(job: Job, ranks: int, *, samples: bool) -> Plan:
    """What each rank takes, by the sums that runs use."""
    how = replace(job.memory.training, ranks=ranks)
    plan = replace(job.memory, training=how, engine=job.memory.engine if samples else None)
    plan = settled(plan, job.free, job.longest, tokens=job.budget, checkpointing=job.checkpointing)
    return with_logits(plan, job.free, None if job.memory.training.keep_logits else 0)


def taken_bytes(job: Job, plan: Plan, ranks: int) -> dict[str, int]:
    """What a rank is expected to take: passes as large as an update of usual length makes them."""
    work = job.workload
    each, budget = work.trained_tokens / ranks / job.steps, plan.training.tokens
    together = work.group_tokens if ranks == 1 else 0.0
    passes = passes_of(each, budget, together)
    largest = each / passes
    if 0 < together <= budget:  # whole groups, as even as they are
        largest = ceil(ceil(each / together - 1e-9) / passes) * together
    sampled = work.episodes * work.context
    return plan.taken(min(largest, budget), sampled, beside=job.mode != "sync")


def server_slots(job: Job, gpus: int) -> tuple[int, int]:
    """How many rows a server with `gpus` GPUs holds at their usual length, and the bytes of each
    GPU; no rows if not one fits at full length."""
    shape = job.costs.shape
    need = server_need(
        shape, weights=2 * shape.parameters, item=2, slots=job.slots, context=job.context, gpus=gpus
    )
    room = int(_SERVER_SHARE * job.free)
    if need is None or need.least > room:
        return 0, need.least if need else 0
    each = job.workload.context * shape.kv_numbers * 2 / gpus
    slots = max(1, min(job.slots, int((room - need.weights - need.step) / each)))
    return slots, need.weights + need.step + int(slots * each)


def splits(job: Job, gpus: int) -> Iterator[Split]:
    """Splits that fit; with several nodes, the trainer has whole ones."""
    if gpus == 1:
        if trainer_plan(job, 1, samples=True).fits(job.free):
            yield Split(1)
        return
    node = int(job.costs.profile["gpus_per_node"])
    each = next((g for g in (1, 2, 4, 8) if g <= gpus and server_slots(job, g)[0]), None)
    if each is None:
        return
    sizes = {max(1, round(share * gpus)) for share in _SHARES}
    if gpus > node:
        sizes = {max(node, ranks // node * node) for ranks in sizes}
    for ranks in sorted(sizes):
        servers = (gpus - ranks) // each
        if servers and trainer_plan(job, ranks, samples=False).fits(job.free):
            yield Split(ranks, servers, each)


def setup_of(job: Job, split: Split, updates: int) -> tuple[Setup, Plan, int]:
    """What the simulation plays; the trainer's plan; a server's bytes."""
    costs, work = job.costs, replace(job.workload, updates=updates)
    alone = split.servers == 0
    plan = trainer_plan(job, split.ranks, samples=alone)
    gpus = split.gpus_per_server
    slots, server_bytes = (job.slots, 0) if alone else server_slots(job, gpus)
    slots = max(1, min(slots, work.episodes * (2 + job.lag)))
    how = plan.training

    def train_s(tokens: float, longest: float) -> float:
        return job.epochs * costs.update_s(
            *(tokens, longest),
            budget=how.tokens,
            context=work.context,
            ranks=split.ranks,
            again=how.checkpointing,
            steps=job.steps,
            together=work.group_tokens,
            on_host=how.optimizer_device == "cpu",
        )

    profile, rate = costs.profile, job.failures_per_gpu_hour
    actors = job.hosts if alone else max(1, ceil(work.episodes / EPISODES_PER_ACTOR))
    streams = job.mode == "async"
    engines = actors if alone and streams else 1
    own = profile["host_own_s"] if alone and actors > 1 and not streams else 0.0
    copied, arrives = costs.handed_over_s() if alone and streams else (0.0, 0.0)
    return (
        Setup(
            workload=work,
            servers=max(split.servers, 1),
            slots=slots,
            # Actors on one GPU have engines of their own, which take turns.
            step_s=[
                engines * costs.decode_s(ceil(rows / engines), 0.0, gpus, server=not alone)
                for rows in range(slots + 1)
            ],
            cached_s=costs.cached_token_s(gpus),
            prompt_s=costs.prompt_s(1, work.prompt, gpus),
            request_s=0.0 if alone else profile["server_request_s"],
            train_s=train_s,
            hosts=actors,
            own_episode_s=own,
            host_episode_s=host_episode_s(job) - own + work.host_s,
            host_turn_s=profile["host_turn_s"],
            host_token_s=profile["host_token_s"],
            intake_episode_s=profile["intake_episode_s"] if streams else 0.0,
            intake_token_s=profile["intake_token_s"] if streams else 0.0,
            publish_s=copied if alone else costs.publish_s(split.servers, split.gpus),
            arrives_s=arrives,
            pause_s=0.0 if alone else costs.pause_s,
            other_s=profile["other_s"],
            lag=_lag(job),
            ahead=job.mode == "ahead",
            in_order=job.in_order,
            shared=alone,
            in_process=alone,
            checkpoint_every=job.checkpoint_every,
            checkpoint_s=costs.checkpoint_s / split.ranks,
            server_failures_per_hour=0.0 if alone else rate * gpus,
            trainer_failures_per_hour=rate * split.ranks,
            seed=job.seed,
        ),
        *(plan, server_bytes),
    )


def host_episode_s(job: Job) -> float:
    """The seconds that an episode takes of the host, besides what its environment computes."""
    profile = job.costs.profile
    thread_s = profile["host_thread_s"] if job.threaded else 0.0
    return profile["host_episode_s"] - (0.0 if job.writes else profile["host_write_s"]) + thread_s


def try_split(job: Job, split: Split, updates: int) -> Option:
    """Plays some updates of a split that fits."""
    setup, plan, server_bytes = setup_of(job, split, updates)
    result = simulate(setup)
    limit = limit_of(job, split, setup, result)
    taken = sum(taken_bytes(job, plan, split.ranks).values())
    return Option(split, plan, taken, server_bytes, setup.hosts, result, limit)


def best(job: Job, gpus: int) -> Option:
    """Returns the quickest split of `gpus` GPUs; raises `OutOfMemoryError` if none fits."""
    tries = [try_split(job, split, _TRIED + _lag(job)) for split in splits(job, gpus)]
    if not tries:
        needed = trainer_plan(job, max(gpus - 1, 1), samples=gpus == 1)
        raise OutOfMemoryError(
            f"no split of {gpus} of these GPUs fits: a trainer on {max(gpus - 1, 1)} would take "
            f"{needed.total / GIB:.1f} of {job.free / GIB:.1f} GiB on each, and a server "
            f"{server_slots(job, min(gpus, 8))[1] / GIB:.1f} GiB at least; plan for more GPUs, "
            "model.lora.rank, or a shorter training.max_seq_len"
        )
    quickest = min(tries, key=lambda option: option.result.update_s)
    played = min(max(job.workload.updates, 2), _PLAYED + _lag(job))
    return try_split(job, quickest.split, played)


def _lag(job: Job) -> int:
    return {"sync": 0, "ahead": 1, "async": job.lag}[job.mode]


def limit_of(job: Job, split: Split, setup: Setup, result: Result) -> str:
    """What an update waits for most."""
    work, costs = job.workload, job.costs
    intake = setup.intake_token_s * work.trained_tokens + setup.intake_episode_s * work.episodes
    parts = {
        "sampling": result.wait_s,
        "trainer": result.train_s,
        "publishing": result.publish_s,
        "trainer's intake": intake,
    }
    limit = max(parts, key=lambda name: parts[name])
    if limit == "trainer":
        each = max(work.trained_tokens / split.ranks, 1)
        passes = passes_of(each, trainer_plan(job, split.ranks, samples=False).training.tokens)
        moving = passes * costs.collective_s(split.ranks) * job.epochs
        return "trainer's links" if moving > 0.9 * result.train_s else "trainer"
    if limit != "sampling":
        return limit
    alone = setup.step_s[1] + setup.cached_s * work.context
    causes = {
        "environment": work.turns * work.env_s,
        "stragglers": (result.longest - work.prompt) * alone,
        "hosts": work.episodes * (setup.own_episode_s + setup.host_episode_s / setup.hosts)
        + work.episodes * work.lengths.mean * work.turns * setup.host_token_s / setup.hosts,
    }
    cause = max(causes, key=lambda name: causes[name])
    return cause if causes[cause] > 0.6 * result.wait_s else "sampling"
