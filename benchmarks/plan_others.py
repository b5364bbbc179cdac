"""What other systems published, for `benchmarks.plan`: ratios of asynchronous to synchronous."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks import plan_rows as seen
from benchmarks.plan_own import Line, memory_of, solved
from ludic.memory.shape import ModelShape
from ludic.plan.costs import Costs
from ludic.plan.profile import Profile, load_profile
from ludic.plan.search import Job, Split, setup_of, try_split
from ludic.plan.setup import Result, Setup
from ludic.plan.shapes import shape_named
from ludic.plan.simulation import simulate
from ludic.plan.workload import Lengths, Workload


def long_job(profile: Profile, shape: ModelShape, mean: float, most: int, **how: Any) -> Job:
    """512 prompts of 16 answers, or `prompts` of `group`."""
    prompts, group = how.pop("prompts", 512), how.pop("group", 16)
    lengths = Lengths(mean, most, how.pop("spread", 0.8))
    return Job(
        costs=Costs(profile, shape),
        workload=Workload(prompts * group, group, lengths, 100, prompt=200),
        memory=memory_of(shape, None, 256, most + 1024),
        longest=most + 1024,
        slots=256,
        context=most + 1024,
        **how,
    )


def colocated(job: Job, gpus: int, *, other_s: float = 0.0, slower: float = 1.0) -> Setup:
    """Everybody samples, then everybody trains; `slower` than we would."""
    setup, *_ = setup_of(job, Split(gpus, gpus), 1)
    train_s = setup.train_s
    return replace(
        setup,
        train_s=lambda tokens, longest: slower * train_s(tokens, longest),
        lag=0,
        publish_s=other_s,
        pause_s=0.0,
    )


def verl_lines() -> Iterable[Line]:
    """Lengths fitted to the synchronous row's generation, the trainer's speed to its update; then
    asynchronous: with the same lengths, and with lengths fitted to that row's own update."""
    profile, most = load_profile("h20"), 28_672
    for row in seen.VERL:
        other = row.sync - row.gen - row.old_log_prob - row.update_actor

        def gen(mean: float, gpus: int = row.gpus) -> float:
            return simulate(colocated(long_job(profile, seen.SEVEN, mean, most), gpus)).wait_s

        mean = solved(gen, row.gen, 200, 12_000)
        job = long_job(profile, seen.SEVEN, mean, most)
        slower = row.update_actor / simulate(colocated(job, row.gpus)).train_s
        name, measured = f"verl 7B, {row.gpus} H20", row.asynchronous / row.sync
        same = separate(job, row.gpus // 2, slower, other).update_s
        yield Line("async : sync", f"{name}, same lengths", same / row.sync, measured, unit="")

        def update(
            mean: float, half: int = row.gpus // 2, slower: float = slower, other: float = other
        ) -> float:
            job = long_job(profile, seen.SEVEN, mean, most)
            return separate(job, half, slower, other).train_s

        shorter = solved(update, row.async_update, 200, 12_000)
        own = separate(long_job(profile, seen.SEVEN, shorter, most), row.gpus // 2, slower, other)
        note = f"{name}, lengths of its own ({shorter:,.0f} for {mean:,.0f})"
        yield Line("async : sync", note, own.update_s / row.sync, measured, unit="")


def separate(job: Job, half: int, slower: float, other: float) -> Result:
    """Half of the GPUs train, half sample; half a batch may be older."""
    job = replace(job, mode="async", lag=1, in_order=False)
    setup, *_ = setup_of(job, Split(half, half), 5)
    train_s = setup.train_s
    return simulate(
        replace(
            setup,
            train_s=lambda tokens, longest: slower * train_s(tokens, longest),
            publish_s=other,
            intake_token_s=0.0,
            intake_episode_s=0.0,
        )
    )


def areal_lines() -> Iterable[Line]:
    """Held out. The synchronous row gives the lengths; the ratio is judged."""
    profile, most = load_profile("h800"), 27_648
    for row in seen.AREAL:
        gpus = 8 * row.nodes

        def sync(mean: float, shape: ModelShape = row.shape, gpus: int = gpus) -> float:
            return simulate(colocated(long_job(profile, shape, mean, most), gpus)).update_s

        mean = solved(sync, row.sync, 200, 20_000)
        job = long_job(profile, row.shape, mean, most, mode="async", lag=4, in_order=False)
        job = replace(job, costs=Costs(_without_intake(profile), row.shape))
        trainer = gpus // 4 // 8 * 8
        result = try_split(job, Split(trainer, gpus - trainer), 9).result
        name = f"AReaL {row.shape.parameters / 1e9:.1f}B, {gpus} H800, held out"
        measured = row.asynchronous / row.sync
        yield Line("async : sync", name, result.update_s / row.sync, measured, unit="")


def _without_intake(profile: Profile) -> Profile:
    return profile.with_figures(
        "assumed", "another system's", intake_token_s=0.0, intake_episode_s=0.0
    )


def nemo_lines() -> Iterable[Line]:
    """Megatron and tensor parallelism, which Ludic has not: shown, not judged."""
    profile = load_profile("h100")
    for row in seen.NEMO:
        gpus, mean, seconds = row.sync
        how: dict[str, Any] = {"prompts": 64, "group": 32}
        job = long_job(profile, shape_named(row.name), mean - 200, 4096, **how)
        result = simulate(colocated(job, gpus))
        yield Line(
            "NeMo-RL", f"{row.name}, {gpus} H100, on policy", result.update_s, seconds, "shown"
        )
