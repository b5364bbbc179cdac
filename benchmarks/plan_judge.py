"""Judges the H200's profile by runs that were made after it was fixed, for `benchmarks.plan`.

`judged_lines(FOLDER)` looks through a folder for run folders of `ludic train`, and for files with
the JSON lines that `benchmarks.loop`, `benchmarks.decode` and `benchmarks.memory` print. Settings
and lengths are the run's own; nothing is fitted. Times are medians, without the first updates.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.plan_own import Line, job_of, memory_lines, whole_lines
from benchmarks.plan_rows import SUMS, USUAL, Whole
from ludic.errors import ConfigError
from ludic.memory.shape import Adapter
from ludic.plan.costs import Costs
from ludic.plan.profile import Profile, shape_named
from ludic.plan.search import Job, Split, setup_of
from ludic.plan.simulation import simulate
from ludic.runs.planning import Given
from ludic.runs.planning import job_of as job_of_run

ROOT = Path(__file__).resolve().parent.parent
FIRST = 3
"""Updates that are left out: graphs are captured in them."""
UNSEEN = 0.01
"""Seconds below which a phase is not judged: it takes no time."""
_SIZES = {
    "SmolLM2-135M": r"smol|135m",
    "Qwen2.5-0.5B": r"0\.5b|q(wen)?-?(2\.5-)?05|half",
    "Qwen2.5-1.5B": r"1\.5b|q(wen)?-?(2\.5-)?15",
    "Qwen2.5-7B": r"7b",
}


def name_of(model: str) -> str:
    """A published model's name by that of its folder."""
    plain = Path(model).name.lower()
    return next((name for name, text in _SIZES.items() if re.search(text, plain)), model)


def judged_lines(folder: Path, profile: Profile) -> tuple[list[Line], list[str]]:
    """A line for each figure, and what was left out, with the reason."""
    lines: list[Line] = []
    left_out: list[str] = []
    runs = sorted(path.parent for path in folder.rglob("run.json"))
    for run in runs:
        try:
            lines += run_lines(run, profile)
        except Exception as exc:  # one run that cannot be read must not hide the others
            left_out.append(f"{run.relative_to(folder)}: {exc}")
    for path in sorted(folder.rglob("*")):
        inside = any(path.is_relative_to(run) for run in runs)
        if inside or path.suffix not in (".json", ".jsonl", ".log", ".txt", ".out"):
            continue
        name = str(path.relative_to(folder).with_suffix(""))
        for facts in json_lines(path):
            try:
                lines += benchmark_lines(name, facts, profile)
            except ConfigError as exc:
                left_out.append(f"{name}: {exc}")
    return lines, left_out


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects that stand on lines of their own, or the whole file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    for part in [text, *(line for line in text.splitlines() if line.startswith("{"))]:
        try:
            facts = json.loads(part)
        except ValueError:
            continue
        if isinstance(facts, dict):
            yield facts
            if part is text:
                return


# Run folders


def run_lines(folder: Path, profile: Profile) -> Iterable[Line]:
    """The phases of a run and its memory."""
    settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if settings["inference"]["backend"] != "local":
        raise ValueError("it samples with servers, which is not judged here")
    if _ran_on_a_cpu(folder):
        raise ValueError(f"it ran on a CPU, and the profile is that of {profile.machine}")
    name = settings["model"]["name"]
    shape = None if name == "tiny" else name_of(name)
    _find_environment(folder)
    job, _ = job_of_run(folder, (), Given(gpu=profile.name, shape=shape, earlier=folder))
    setup, *_ = setup_of(job, Split(1), 12)
    result = simulate(setup)
    work = job.workload
    intake = setup.intake_token_s * work.trained_tokens + setup.intake_episode_s * work.episodes
    phases = {
        "update": result.update_s,
        "waiting": result.wait_s + intake,
        "passes": result.train_s,
        "publishing": result.publish_s,
    }
    title = f"{folder.name} ({job.mode})"
    measured = measured_phases(folder)
    for phase, predicted in phases.items():
        if measured[phase] >= UNSEEN:
            yield Line(f"run: {phase}", title, predicted, measured[phase])
    yield from memory_lines(job, title, measured.get("peak_gb"), None)


def _origin(folder: Path) -> dict[str, Any]:
    path = folder / "origin.json"
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return facts


def _ran_on_a_cpu(folder: Path) -> bool:
    machine = _origin(folder).get("machine") or {}
    return bool(machine) and not machine.get("gpu")


def _find_environment(folder: Path) -> None:
    """Makes the modules of an example importable that ran on another machine."""
    home = Path(_origin(folder).get("run_file_folder") or ".")
    here = ROOT.joinpath(*home.parts[-2:])
    if home.parts[-2:-1] == ("examples",) and here.is_dir() and str(here) not in sys.path:
        sys.path.append(str(here))


def measured_phases(folder: Path) -> dict[str, float]:
    """Medians over a run's updates and their peak, without the first few, in which graphs are
    captured and the largest pass is tried."""
    rows = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rows = [row for row in rows if "perf/elapsed_s" in row]
    if len(rows) <= FIRST + 1:
        raise ValueError(f"{len(rows)} updates are too few: more than {FIRST + 1} are needed")
    counted = rows[FIRST:]

    def of(*names: str) -> float:
        return float(median(sum(row.get(f"perf/{n}", 0.0) for n in names) for row in counted))

    ends = [row["perf/elapsed_s"] for row in rows[FIRST - 1 :]]
    peaks = [row.get("perf/gpu_mem_peak_mb", 0.0) for row in counted]
    return {
        "update": median(b - a for a, b in pairwise(ends)),
        "waiting": of("wait_for_batch_s", "wait_for_next_batch_s"),
        "passes": of("forward_backward_s", "optimizer_s"),
        "publishing": of("publish_s"),
        "peak_gb": max(peaks) * 2**20 / 1e9,
    }


# Lines of benchmarks


def benchmark_lines(name: str, facts: Mapping[str, Any], profile: Profile) -> Iterator[Line]:
    if facts.get("benchmark") == "loop" and facts.get("step_s"):
        yield from loop_lines(name, facts, profile)
    for key, value in facts.items():
        if match := re.fullmatch(r"([\d.]+b)(_lora(\d+))?_(\d+)_rows_ms", key):
            size, _, rank, count = match.groups()
            costs = Costs(profile, shape_named(name_of(size)), Adapter(int(rank)) if rank else None)
            rows = int(count)
            ms = 1000 * costs.decode_s(rows, rows * facts.get("context", 320))
            title = f"{name}: {size}{', LoRA' if rank else ''}, {rows} rows"
            yield Line("decode step", title, ms, value, unit="ms")
        elif isinstance(value, dict) and value.get("peak_gb") and _filled(value):
            title = f"{name}: {key}"
            yield Line("update's memory", title, value["predicted_gb"], value["peak_gb"], unit="GB")


def _filled(facts: Mapping[str, Any]) -> bool:
    """Whether a batch of `benchmarks.memory` was as large as the pass that was predicted."""
    batch = facts.get("tokens_per_s", 0) * facts.get("update_s", 0)
    return "predicted_gb" in facts and facts.get("tokens_of_a_pass", 0) <= 1.01 * (batch or 1e9)


def loop_lines(name: str, facts: Mapping[str, Any], profile: Profile) -> Iterator[Line]:
    """A whole update as `benchmarks.loop` measured it."""
    row = loop_row(name, facts)
    yield from (line for line in whole_lines(profile, row) if line.measured >= UNSEEN)
    job = job_of(profile, row)
    yield from memory_lines(job, row.name, facts.get("torch_peak_gb"), facts.get("peak_gb"))
    if (ms := facts.get("decode_step_ms")) and row.how["spread"] == 0:
        yield Line("run: decode step", row.name, 1000 * full_step_s(job), ms, row.use, "ms")


def full_step_s(job: Job) -> float:
    """A step of all rows, half of their tokens sampled."""
    rows = min(job.slots, job.workload.episodes)
    context = job.workload.prompt + job.workload.lengths.mean / 2
    return job.costs.decode_s(rows, rows * context)


def loop_row(name: str, facts: Mapping[str, Any]) -> Whole:
    """A line of `benchmarks.loop` as a row."""
    sums = facts["task"] == "sums"
    most = int(facts["max_tokens"])
    turns = int(facts.get("turns", 1))
    mean = min(max(facts["mean_tokens"] / turns, 1.0), most)
    row_tokens = facts.get("row_tokens")
    usual: dict[str, Any] = {**USUAL, **(SUMS if sums else {})}
    prompt = usual["prompt"] if row_tokens is None or turns > 1 else round(row_tokens - mean)
    workers, ahead = facts.get("workers") or 0, facts.get("overlap")
    how = usual | {
        **{"episodes": facts["episodes"], "group": facts["group"], "mean": mean, "most": most},
        **{"turns": turns, "prompt": max(prompt, 1), "hosts": max(workers, 1)},
        "mode": "ahead" if ahead else "sync",
        "spread": 0.0 if mean > 0.98 * most else 0.5,
        "slots": min(facts.get("slots") or facts["episodes"], facts["episodes"]),
        "context": facts.get("context") or (1024 if not sums else None),
        "writes": not facts.get("no_rollouts"),
        "budget": facts.get("micro_tokens"),
        "on_host": facts.get("optimizer_device") == "cpu",
    }
    if computed := facts.get("tokens_computed"):
        whole = how["episodes"] * mean * turns + how["episodes"] / how["group"] * how["prompt"]
        how["trained"] = min(1.0, computed / whole)
    model, rank = facts.get("shape") or facts["model"], facts.get("lora")
    parts = [name, "LoRA" * bool(rank), "ahead" * bool(ahead)]
    parts.append(f"{workers} processes" * bool(workers))
    return Whole(
        ", ".join(filter(None, parts)),
        shape_named(name_of(str(model))),
        Adapter(int(rank)) if rank else None,
        {**how, "keeps_logits": True},
        facts["step_s"],
        facts["wait_s"],
        facts["train_s"],
        use="judged",
        publish=facts.get("publish_s"),
    )
