"""How well `ludic plan` foretells what was measured: `python -m benchmarks.plan`.

The profile of the H200 is fitted on half of our rows (`benchmarks.plan_rows`) and judged on the
others; published rows of other systems are judged by their ratio of asynchronous to synchronous.

    python -m benchmarks.plan                # prints the tables; the last line is JSON
    python -m benchmarks.plan --write        # also writes the H200's profile
    python -m benchmarks.plan --page         # also the tables and the picture of docs/scale.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import plan_rows as seen
from ludic.memory.plan import GIB, Engine, Plan
from ludic.memory.shape import Adapter, ModelShape
from ludic.memory.update import Training
from ludic.plan.costs import Costs
from ludic.plan.fitting import fit
from ludic.plan.profile import Profile, load_profile
from ludic.plan.search import Job, Split, setup_of, try_split
from ludic.plan.setup import Result, Setup
from ludic.plan.shapes import shape_named
from ludic.plan.simulation import simulate
from ludic.plan.workload import Lengths, Workload

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "src" / "ludic" / "plan" / "profiles"
WITHIN = 0.15


@dataclass(frozen=True)
class Line:
    """A figure, foretold and measured; fitted, judged or only shown."""

    group: str
    name: str
    predicted: float
    measured: float
    use: str = "judged"
    unit: str = "s"

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def row(self) -> str:
        digits = 3 if self.measured < 10 else 1
        return (
            f"| {self.group} | {self.name} | {self.predicted:.{digits}f} {self.unit} | "
            f"{self.measured:.{digits}f} {self.unit} | {self.error:+.0%} | {self.use} |"
        )


# The H200


def fitted(base: Profile) -> Profile:
    """The H200's profile from those rows that are there to fit it."""
    source = "benchmarks/README.md"
    low, high = (seen.CACHE[tokens] for tokens in (512, 1024))
    size = 256 * 512 * 2 * seen.HALF.kv_numbers
    given = {"decode_cache_s": (high - low) / 1000 / size}
    bare = [row for row in seen.DECODE if row.fits and row.adapter is None]
    found = fit(
        [(Costs(base, r.shape).decode_features(r.rows, 320 * r.rows), r.ms / 1000) for r in bare],
        given,
    )
    found |= given
    profile = base.with_figures("measured", f"{source}, fitted: decode steps", **found)
    with_lora = [row for row in seen.DECODE if row.fits and row.adapter is not None]
    ratio = fmean(r.ms / 1000 / Costs(profile, r.shape).decode_s(r.rows, 320 * r.rows)
                  for r in with_lora)  # fmt: skip
    profile = profile.with_figures("measured", f"{source}, fitted", decode_adapter=ratio)
    rows = [r for r in seen.PASSES if r.fits]
    # Products took half of the time at 40 % of the peak, by torch's profiler.
    products = {"pass_flop_s": 1 / (0.8e12 * profile["peak_tflops"])}
    found = fit([(pass_features(profile, r), r.seconds) for r in rows], products)
    text = f"{source}, products by torch's profiler, the rest fitted: passes"
    profile = profile.with_figures("measured", text, **found, **products)
    requests, seconds, _ = seen.VLLM[0]
    sampling = seconds - Costs(profile, seen.HALF).prompt_s(256 * requests, 256)
    text = f"{source}: vLLM 0.26 over HTTP"
    token_s = sampling / requests / 128
    return profile.with_figures("measured", text, server_token_s=token_s)


def pass_features(profile: Profile, row: seen.Pass) -> dict[str, float]:
    costs = Costs(profile, row.shape, row.adapter)
    return costs.pass_features(row.tokens, passes=row.passes, context=row.context)


def solved(function: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a growing function, almost a line, reaches the goal: by the chord, seven times."""
    below, above = function(low) - goal, function(high) - goal
    middle = low
    for _ in range(7):
        share = 0.5 if above <= below else min(max(-below / (above - below), 0.02), 0.98)
        middle = low + share * (high - low)
        value = function(middle) - goal
        if abs(value) < 0.003 * goal:
            break
        if value < 0:
            low, below = middle, value
        else:
            high, above = middle, value
    return middle


def memory_of(shape: ModelShape, adapter: Adapter | None, slots: int, context: int) -> Plan:
    training = Training(tokens=context, precision="bfloat16", adapter=adapter)
    return Plan(shape, training, Engine(slots, context))


def whole(profile: Profile, row: seen.Whole, host_s: float = 0.0) -> Result:
    """A whole update of ours; `host_s` is what GSM8K's environment takes of the host."""
    how: dict[str, Any] = {
        **{"episodes": 128, "group": 8, "mean": 309, "most": 512, "spread": 0.5, "prompt": 150},
        **{"slots": 128, "hosts": 1, "lag": 0, "ahead": False, "turns": 1},
        **{"host_s": 0.0 if "mean" in row.how and row.how["mean"] < 100 else host_s},
        **row.how,
    }
    lengths = Lengths(how["mean"], how["most"], how.get("spread", 0.5))
    work = Workload(
        how["episodes"],
        how["group"],
        lengths,
        12,
        prompt=how["prompt"],
        turns=how["turns"],
        host_s=how["host_s"],
    )
    costs = Costs(profile, row.shape, row.adapter)
    context = int(work.prompt + work.turns * (lengths.most + work.observation))
    job = Job(
        costs=costs,
        workload=work,
        memory=memory_of(row.shape, row.adapter, how["slots"], context),
        longest=context,
        slots=how["slots"],
        hosts=how["hosts"],
    )
    setup, *_ = setup_of(job, Split(1), work.updates)
    setup = replace(setup, lag=how["lag"], ahead=how["ahead"])
    if how.get("publishes"):
        setup = replace(setup, publish_s=costs.publish_s(1, 1), pause_s=costs.pause_s)
    if how.get("server"):
        steps = [costs.decode_s(rows, server=True) for rows in range(setup.slots + 1)]
        setup = replace(setup, step_s=steps)
    return simulate(setup)


def fitted_host_s(profile: Profile) -> float:
    """What an episode of GSM8K takes of the host beside what any does: from the row that fits."""
    row = next(row for row in seen.WHOLE if row.fits)
    assert row.wait is not None
    return solved(
        lambda s: whole(profile, row._replace(how={**row.how, "host_s": s})).wait_s,
        *(row.wait, 0.0, 0.01),
    )


def engine_s(profile: Profile, requests: int, *, server: bool) -> float:
    """So many requests of 256 + 128 tokens to a 0.5B."""
    costs = Costs(profile, seen.HALF)
    step = fmean(costs.decode_s(requests, requests * (256 + n), server=server) for n in range(128))
    return costs.prompt_s(256 * requests, 256) + 128 * step


def own_lines(profile: Profile) -> Iterable[Line]:
    """What we measured on one H200."""
    for d in seen.DECODE:
        ms = 1000 * Costs(profile, d.shape, d.adapter).decode_s(d.rows, 320 * d.rows)
        yield Line("decode step", f"{d.name}, {d.rows} rows", ms, d.ms, _use(d.fits), "ms")
    more = 256 * (2432 - 512) * Costs(profile, seen.HALF).cached_token_s()
    longest = seen.CACHE[512] + 1000 * more
    yield Line(*("decode step", "0.5B, 256 rows of 2,432", longest, seen.CACHE[2432]), unit="ms")
    for p in seen.PASSES:
        features = pass_features(profile, p)
        seconds = sum(profile[name] * size for name, size in features.items())
        yield Line("passes", p.name, seconds, p.seconds, _use(p.fits))
    for requests, seconds, _ in seen.ENGINE:
        predicted = engine_s(profile, requests, server=False)
        yield Line("engine", f"0.5B, {requests} requests of 256 + 128", predicted, seconds)
    for requests, seconds, fits in seen.VLLM:
        predicted = engine_s(profile, requests, server=True)
        yield Line("vLLM", f"0.5B, {requests} requests", predicted, seconds, _use(fits))
    for size, seconds, pause, fits in seen.PUBLISH:
        predicted = profile["publish_s"] + size * profile["publish_byte_s"]
        name = f"{size / 1e6:.0f} MB to vLLM"
        yield Line("publish", name, predicted, seconds, _use(fits))
        if pause is not None:
            paused = profile["pause_s"] + size * profile["pause_byte_s"]
            yield Line("publish", f"{name}, paused", paused, pause, _use(fits))
    host_s = fitted_host_s(profile)
    for w in seen.WHOLE:
        result = whole(profile, w, host_s)
        pairs = [
            ("update", result.update_s, w.update),
            ("waiting", result.wait_s, w.wait),
            ("passes", result.train_s, w.passes),
            ("publishing", result.publish_s, w.publish),
        ]
        for phase, predicted, measured in pairs:
            if measured is not None:
                use = "shown" if "turns" in w.how else _use(w.fits and phase == "waiting")
                yield Line(f"run: {phase}", w.name, predicted, measured, use)
    plan, gb = gsm8k_plan(profile), 1e9
    total = plan.total / gb
    yield Line("memory", "1.5B, GSM8K, of the device", total, seen.GSM8K_MEMORY_GB, unit="GB")


def gsm8k_plan(profile: Profile) -> Plan:
    """The memory of the README's run as the run itself plans it, with a 1.5B."""
    from ludic.memory.plan import settled

    plan = memory_of(seen.ONE, None, 128, 1024)
    return settled(plan, int(profile["memory_gib"] * GIB), 1024)


def _use(fits: bool) -> str:
    return "fitted" if fits else "judged"


# Other systems


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


# Reading a batch


def intake() -> dict[str, float]:
    """Processor time of the trainer's side of Redis: messages to a batch, by episode and token."""
    import asyncio
    import time

    import msgspec

    from benchmarks import pipeline
    from ludic.pipeline.messages import Group, group_message, read_group
    from ludic.saw.building import batch_from_rollouts
    from ludic.training.algorithms.grpo import make_grpo

    request = msgspec.structs.replace(pipeline.REQUEST, num_episodes=pipeline.GROUP)
    credit, lines = make_grpo(group_size=pipeline.GROUP).credit_assigner, []
    for pipeline.TOKENS in (256, 1024):
        engine, _ = pipeline.make_engine()
        groups = [asyncio.run(engine.generate_rollouts([request])) for _ in range(8)]
        messages = [
            group_message(Group(i, tuple(r.labelled(group_id=str(i)) for r in group)))
            for i, group in enumerate(groups)
        ]
        times = []
        for _ in range(10):
            begin = time.process_time()
            rollouts = [r for message in messages for r in read_group(message).rollouts]
            batch_from_rollouts(rollouts, credit)
            times.append((time.process_time() - begin) / len(rollouts))
        lines.append((pipeline.TOKENS, min(times)))
    (few, low), (many, high) = lines
    token_s = (high - low) / (many - few)
    return {"intake_token_s": token_s, "intake_episode_s": low - few * token_s}


# What is printed


def report(lines: Sequence[Line]) -> str:
    head = "| | | foretold | measured | error | |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(line.row() for line in lines)])


def figures(lines: Sequence[Line]) -> dict[str, Any]:
    judged = [line for line in lines if line.use == "judged"]
    ours = [line for line in judged if line.group != "async : sync"]
    ratios = [line for line in judged if line.group == "async : sync"]
    return {
        "judged": len(ours),
        "within_15_percent": sum(abs(line.error) <= WITHIN for line in ours),
        "mean_error": round(fmean(abs(line.error) for line in ours), 4),
        "worst": round(max(ours, key=lambda line: abs(line.error)).error, 4),
        "ratios": {
            line.name: [round(line.predicted, 3), round(line.measured, 3)] for line in ratios
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write the H200's profile")
    parser.add_argument("--intake", action="store_true", help="measure reading a batch, and stop")
    parser.add_argument("--page", action="store_true", help="write the tables and the picture")
    args = parser.parse_args(words)
    if args.intake:
        print(json.dumps(intake()))
        return
    profile = load_profile("h200")
    if args.write:
        profile = fitted(profile)
        profile.write(PROFILES / "h200.json")
    lines = [*own_lines(profile), *verl_lines(), *areal_lines(), *nemo_lines()]
    print(report(lines))
    if args.page:
        from benchmarks.plan_page import write_page

        write_page(report(lines))
    print(json.dumps(figures(lines)))


if __name__ == "__main__":
    main()
