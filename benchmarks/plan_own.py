"""The H200's profile from our own measurements, and how close it comes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from benchmarks import plan_rows as seen
from ludic.memory.plan import Engine, Plan
from ludic.memory.shape import Adapter, ModelShape
from ludic.memory.update import Training
from ludic.plan.costs import Costs
from ludic.plan.profile import Profile, fit
from ludic.plan.search import Job, Split, setup_of, taken_bytes, trainer_plan
from ludic.plan.simulation import simulate
from ludic.plan.workload import Lengths, Result, Workload

_SOURCE = "benchmarks/README.md"
_EXACT = 0.003


@dataclass(frozen=True)
class Line:
    """A figure, predicted and measured; fitted, judged or only shown."""

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


def table(lines: Sequence[Line]) -> str:
    head = "| | | predicted | measured | error | |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(line.row() for line in lines)])


def solved(function: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a growing function, almost a line, reaches the goal: by the chord, seven times."""
    below, above = function(low) - goal, function(high) - goal
    middle = low
    for _ in range(7):
        share = 0.5 if above <= below else min(max(-below / (above - below), 0.02), 0.98)
        middle = low + share * (high - low)
        value = function(middle) - goal
        if abs(value) < _EXACT * goal:
            break
        if value < 0:
            low, below = middle, value
        else:
            high, above = middle, value
    return middle


# The fit


def fitted(base: Profile) -> Profile:
    """The H200's profile from all rows of code that is still there."""
    profile = with_passes(with_decoding(base))
    sampling = fmean(
        (seconds - Costs(profile, seen.HALF).prompt_s(256 * requests, 256)) / requests / 128
        for requests, seconds in seen.VLLM
    )
    text = f"{_SOURCE}: vLLM 0.26 over HTTP"
    return _with_host(profile.with_figures("measured", text, server_token_s=sampling))


def with_decoding(base: Profile) -> Profile:
    low, high = (seen.CACHE[tokens] for tokens in (512, 2432))
    size = 256 * (2432 - 512) * 2 * seen.HALF.kv_numbers
    given = {"decode_cache_s": (high - low) / 1000 / size}
    rows = [
        (Costs(base, r.shape, r.adapter).decode_features(r.rows, 320 * r.rows), r.ms / 1000)
        for r in seen.DECODE
    ]
    text = f"{_SOURCE}, fitted: decode steps"
    return base.with_figures("measured", text, **fit(rows, given), **given)


def with_passes(profile: Profile) -> Profile:
    # Products took half of the time at 40 % of the peak, by torch's profiler.
    products = {"pass_flop_s": 1 / (0.8e12 * profile["peak_tflops"])}
    rows = [
        (Costs(profile, r.shape, r.adapter).pass_features(r.tokens, context=r.context), r.seconds)
        for r in seen.PASSES
        if r.use == "fitted"
    ]
    text = f"{_SOURCE}, products by torch's profiler, the rest fitted: passes"
    profile = profile.with_figures("measured", text, **fit(rows, products), **products)
    starts = [
        row.seconds / row.passes / row.shape.layers
        for row in (seen.REPLAYED, seen.LAUNCHED, seen.LAUNCHED_LORA)
    ]
    text = f"{_SOURCE}: small passes of the 135M, replayed and launched, and of the 7B with LoRA"
    return profile.with_figures(
        *("measured", text),
        pass_layer_s=starts[0],
        pass_launch_s=starts[1],
        pass_launch_adapter_s=starts[2] - starts[1],
    )


def _with_host(profile: Profile) -> Profile:
    """Tokens from the engine's own load; what rollouts' files and threads take, and what is left of
    an update, from whole runs."""
    unset = dict.fromkeys(("host_token_s", "host_thread_s", "host_write_s"), 0.0)
    plain = profile.with_figures("measured", "", **unset)
    token_s = median(
        max(seconds - engine_s(plain, requests, server=False), 0.0) / requests / 128
        for requests, seconds in seen.ENGINE
    )
    text = f"{_SOURCE}: requests of 256 + 128 tokens, less their steps and prompts"
    profile = plain.with_figures("measured", text, host_token_s=token_s)
    text = f"{_SOURCE}, fitted: whole updates"
    rows = [row for row in seen.WHOLE if row.use == "fitted"]
    left = [r.update - r.wait - r.passes for r in rows if r.wait and r.passes]
    profile = profile.with_figures("measured", text, other_s=median(left))
    kinds = {"host_episode_s": "sums", "host_thread_s": "threaded", "server_request_s": "server"}
    for name, way in kinds.items():
        profile = profile.with_figures(
            "measured", text, **{name: _fitted_host(profile, name, way, rows)}
        )
    unwritten = _fitted_host(profile, "host_episode_s", "unwritten", rows)
    return profile.with_figures(
        "measured", text, host_write_s=max(profile["host_episode_s"] - unwritten, 0.0)
    )


def _fitted_host(profile: Profile, name: str, way: str, rows: Sequence[seen.Whole]) -> float:
    """What a figure of the host has to be for runs of a kind to wait as long as they did, the
    median of them."""
    found = []
    for row in rows:
        if row.kind == way and row.wait is not None:

            def wait_s(value: float, row: seen.Whole = row) -> float:
                changed = profile.with_figures("measured", "", **{name: value})
                return whole(changed, row).wait_s

            found.append(solved(wait_s, row.wait, 0.0, 0.01))
    return median(found)


# What it gives


def memory_of(
    shape: ModelShape,
    adapter: Adapter | None,
    slots: int,
    context: int,
    *,
    on_host: bool = False,
    keeps_logits: bool = False,
) -> Plan:
    training = Training(
        tokens=context,
        precision="bfloat16",
        adapter=adapter,
        optimizer_device="cpu" if on_host else "cuda",
        keep_logits=context if keeps_logits else 0,
    )
    return Plan(shape, training, Engine(slots, context))


def job_of(profile: Profile, row: seen.Whole) -> Job:
    """A whole update of ours as a plan sees it."""
    how: dict[str, Any] = {**seen.USUAL, **row.how}
    lengths = Lengths(how["mean"], how["most"], how["spread"], tuple(how["seen"]))
    work = Workload(
        how["episodes"],
        how["group"],
        lengths,
        12,
        prompt=how["prompt"],
        turns=how["turns"],
        trained=how["trained"],
    )
    context = how["context"] or int(work.prompt + work.turns * (lengths.most + work.observation))
    held = {name: how[name] for name in ("on_host", "keeps_logits")}
    return Job(
        costs=Costs(profile, row.shape, row.adapter),
        workload=work,
        memory=memory_of(row.shape, row.adapter, how["slots"], context, **held),
        longest=context,
        budget=how["budget"],
        slots=how["slots"],
        hosts=how["hosts"],
        mode=how["mode"],
        threaded=how["threaded"],
        writes=how["writes"],
    )


def whole(profile: Profile, row: seen.Whole) -> Result:
    job = job_of(profile, row)
    costs = job.costs
    setup, *_ = setup_of(job, Split(1), job.workload.updates)
    if row.how.get("server"):  # vLLM on the trainer's GPU
        steps = [costs.decode_s(rows, server=True) for rows in range(setup.slots + 1)]
        setup = replace(
            setup,
            step_s=steps,
            request_s=profile["server_request_s"],
            in_process=False,
            publish_s=costs.publish_s(1, 1),
            pause_s=costs.pause_s,
        )
    return simulate(setup)


def engine_s(profile: Profile, requests: int, *, server: bool) -> float:
    """So many requests of 256 + 128 tokens to a 0.5B."""
    costs = Costs(profile, seen.HALF)
    step = fmean(costs.decode_s(requests, requests * (256 + n), server=server) for n in range(128))
    host = 0.0 if server else profile["host_token_s"] * 128 * requests
    return costs.prompt_s(256 * requests, 256) + 128 * step + host


def whole_lines(profile: Profile, row: seen.Whole) -> Iterable[Line]:
    """A run's phases."""
    result = whole(profile, row)
    phases = [
        ("update", result.update_s, row.update),
        ("waiting", result.wait_s, row.wait),
        ("passes", result.train_s, row.passes),
        ("publishing", result.publish_s, row.publish),
    ]
    for phase, predicted, measured in phases:
        if measured is not None:
            yield Line(f"run: {phase}", row.name, predicted, measured, row.use)


def own_lines(profile: Profile) -> Iterable[Line]:
    """What we measured on one H200 before the profile was fixed."""
    for d in seen.DECODE:
        ms = 1000 * Costs(profile, d.shape, d.adapter).decode_s(d.rows, 320 * d.rows)
        yield Line("decode step", f"{d.name}, {d.rows} rows", ms, d.ms, "fitted", "ms")
    for p in (*seen.PASSES, seen.REPLAYED, seen.LAUNCHED_LORA):
        costs = Costs(profile, p.shape, p.adapter)
        seconds = costs.pass_s(p.tokens, passes=p.passes, context=p.context)
        yield Line("passes", p.name, seconds, p.seconds, p.use)
    for requests, seconds in seen.ENGINE:
        predicted = engine_s(profile, requests, server=False)
        yield Line(
            "engine", f"0.5B, {requests} requests of 256 + 128", predicted, seconds, "fitted"
        )
    for requests, seconds in seen.VLLM:
        predicted = engine_s(profile, requests, server=True)
        yield Line("vLLM", f"0.5B, {requests} requests", predicted, seconds, "fitted")
    for size, seconds, pause in seen.PUBLISH:
        predicted = profile["publish_s"] + size * profile["publish_byte_s"]
        name = f"{size / 1e6:.0f} MB to vLLM"
        yield Line("publish", name, predicted, seconds, "fitted")
        if pause is not None:
            paused = profile["pause_s"] + size * profile["pause_byte_s"]
            yield Line("publish", f"{name}, paused", paused, pause, "fitted")
    for row in seen.WHOLE:
        yield from whole_lines(profile, row)
        if row.name in seen.MEMORY:
            yield from memory_lines(job_of(profile, row), row.name, *seen.MEMORY[row.name], "shown")


def memory_lines(
    job: Job, name: str, torch_gb: float | None, device_gb: float | None, use: str = "judged"
) -> Iterable[Line]:
    """A run's peaks: what its tensors take, and with what the allocator holds beside them."""
    taken = taken_bytes(job, trainer_plan(job, 1, samples=job.mode != "async"), 1)
    total = sum(taken.values())
    if torch_gb:
        tensors = (total - taken.get("fragmentation", 0)) / 1e9
        yield Line("run: memory of torch", name, tensors, torch_gb, use, "GB")
    if device_gb:
        yield Line("run: memory of the device", name, total / 1e9, device_gb, use, "GB")
