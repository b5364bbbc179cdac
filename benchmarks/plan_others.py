"""What other systems published, for `benchmarks.plan`: ratios of asynchronous to synchronous."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks import plan_rows as seen
from benchmarks.plan_own import Line, memory_of, solved
from ludic.memory.shape import ModelShape
from ludic.plan.costs import Costs
from ludic.plan.profile import Profile, load_profile, shape_named
from ludic.plan.search import Job, Split, setup_of, try_split
from ludic.plan.simulation import simulate
from ludic.plan.workload import Lengths, Result, Setup, Workload

_PARTS = 4
"""Into how many parts verl's asynchronous trainer takes a batch."""


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


def foreign(gpu: str) -> Profile:
    """Another system's machine: batches do not come over our Redis, and its servers do not sample
    as ours are asked to, with a seed and log-probs for each request, over HTTP."""
    none = ("intake_token_s", "intake_episode_s", "server_token_s", "server_request_s", "other_s")
    return load_profile(gpu).with_figures("assumed", "another system's", **dict.fromkeys(none, 0.0))


def verl_lines() -> Iterable[Line]:
    """Lengths fitted to the synchronous row's generation, the trainer's speed to its update; then
    asynchronous: with the same lengths, and with lengths fitted to that row's own update."""
    profile, most = foreign("h20"), 28_672
    for row in seen.VERL:
        other = row.sync - row.gen - row.old_log_prob - row.update_actor

        def gen(mean: float, gpus: int = row.gpus) -> float:
            return simulate(colocated(verl_job(profile, mean, most), gpus)).wait_s

        mean = solved(gen, row.gen, 200, 12_000)
        job = verl_job(profile, mean, most)
        slower = row.update_actor / simulate(colocated(job, row.gpus)).train_s
        name, measured = f"verl 7B, {row.gpus} H20", row.asynchronous / row.sync
        same = separate(job, row.gpus // 2, slower, other).update_s
        yield Line("async : sync", f"{name}, same lengths", same / row.sync, measured, unit="")

        def update(
            mean: float, half: int = row.gpus // 2, slower: float = slower, other: float = other
        ) -> float:
            return separate(verl_job(profile, mean, most), half, slower, other).train_s

        shorter = solved(update, row.async_update, 200, 12_000)
        own = separate(verl_job(profile, shorter, most), row.gpus // 2, slower, other)
        note = f"{name}, lengths of its own ({shorter:,.0f} for {mean:,.0f})"
        yield Line("async : sync", note, own.update_s / row.sync, measured, unit="")


def verl_job(profile: Profile, mean: float, most: int) -> Job:
    """An optimizer step for every 32 prompts."""
    return long_job(profile, seen.SEVEN, mean, most, steps=16)


def separate(job: Job, half: int, slower: float, other: float) -> Result:
    """Half of the GPUs train, half sample. The trainer takes 128 prompts as soon as they are there,
    and four times that is an update; between two publishes half a batch more may be begun."""
    work = replace(job.workload, episodes=job.workload.episodes // _PARTS)
    job = replace(
        job,
        workload=work,
        mode="async",
        lag=_PARTS + _PARTS // 2 - 1,
        in_order=False,
        steps=job.steps // _PARTS,
    )
    setup, *_ = setup_of(job, Split(half, half), 5 * _PARTS)
    train_s = setup.train_s
    result = simulate(
        replace(
            setup,
            train_s=lambda tokens, longest: slower * train_s(tokens, longest),
            publish_s=other / _PARTS,
        )
    )
    result.update_s *= _PARTS
    result.train_s *= _PARTS
    return result


def areal_lines() -> Iterable[Line]:
    """Held out. The synchronous row gives the lengths; the ratio is judged."""
    profile, most = foreign("h800"), 27_648
    for row in seen.AREAL:
        gpus = 8 * row.nodes

        def sync(mean: float, shape: ModelShape = row.shape, gpus: int = gpus) -> float:
            return simulate(colocated(long_job(profile, shape, mean, most), gpus)).update_s

        mean = solved(sync, row.sync, 200, 20_000)
        job = long_job(profile, row.shape, mean, most, mode="async", lag=4, in_order=False)
        trainer = gpus // 4 // 8 * 8
        result = try_split(job, Split(trainer, gpus - trainer), 9).result
        name = f"AReaL {row.shape.parameters / 1e9:.1f}B, {gpus} H800, held out"
        measured = row.asynchronous / row.sync
        yield Line("async : sync", name, result.update_s / row.sync, measured, unit="")


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
