"""Series of updates read from run folders, their tables, and their curves."""

from __future__ import annotations

import glob
import itertools
import json
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ludic.eval import Estimate, EvalReport, Headline, headline_of
from ludic.runs.publishing.card import RunFacts, percent
from ludic.runs.results.terminal import read_curve, smoothed
from ludic.runs.storage import EVALUATIONS, RunFolder

METRIC = "train/reward_mean"
LAST = 10
"""How many updates stand for the end of a run."""


class Point(NamedTuple):
    """One update: when it was done, and the metric's value, by default the mean reward."""

    seconds: float
    reward: float


@dataclass(frozen=True)
class Series:
    """One run's updates. `facts` are those of its run folder, and None for another program's.
    `alone`: nothing else ran on the machine, so that its seconds say something."""

    name: str
    seed: int
    points: Sequence[Point]
    facts: RunFacts | None = None
    machine: str | None = None
    alone: bool = True

    @property
    def end(self) -> float:
        """The mean of the last updates; nan if there are none."""
        last = [p.reward for p in self.points[-LAST:]]
        return statistics.fmean(last) if last else float("nan")


def reached(points: Sequence[Point], goal: float) -> tuple[int, float] | None:
    """Returns the update, counted from 1, and the seconds at which the goal was reached: the first
    update from which the mean of three is at least that."""
    for i in range(2, len(points)):
        if sum(p.reward for p in points[i - 2 : i + 1]) / 3 >= goal:
            return i + 1, points[i].seconds
    return None


def read_points(metrics: Path, metric: str = METRIC) -> list[Point]:
    """Reads the updates of a `metrics.jsonl`; lines without the metric are of something else."""
    _, seconds = read_curve(metrics, "perf/elapsed_s")
    _, values = read_curve(metrics, metric)
    if len(seconds) != len(values):  # a metric that not every update has
        seconds = [float("nan")] * len(values)
    return [Point(*point) for point in zip(seconds, values, strict=True)]


def read_run(
    path: Path, name: str | None = None, metric: str = METRIC, *, curve: bool = True
) -> Series:
    """Reads a run folder, with or without a `curve`."""
    folder = RunFolder.open(path)
    facts, points = RunFacts.of(folder), read_points(folder.metrics, metric)
    if curve and not points:
        raise SystemExit(f"{path} has no {metric} in its metrics.jsonl")
    origin = folder.read_json("origin.json") if folder.has("origin.json") else {}
    machine = origin.get("machine") or {}
    where = machine.get("gpu") or (f"CPU, {machine['cpus']} cores" if "cpus" in machine else None)
    seed = int(facts.settings["run"]["seed"])
    return Series(name or "", seed, points, facts, where)


def read_study(path: Path) -> list[Series]:
    """Reads what `benchmarks.study` found, or a `trl.json` of `benchmarks.real_models`."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [Series(r["name"], r["seed"], [Point(*p) for p in r["points"]]) for r in runs]


def read_trl(text: str) -> list[Point]:
    """Reads the updates of what `benchmarks.trl_loop` printed."""
    updates = [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]
    seconds = itertools.accumulate(update["seconds"] for update in updates)
    return [Point(s, update["reward"]) for s, update in zip(seconds, updates, strict=True)]


def read_all(runs: Iterable[str], metric: str = METRIC) -> list[Series]:
    """Reads everything that the command line names, and gives a name to those without one."""
    found: list[Series] = []
    for run in runs:
        name, _, pattern = run.rpartition("=") if not Path(run).exists() else ("", "", run)
        paths = [Path(p) for p in sorted(glob.glob(pattern))]
        if not paths:
            raise SystemExit(f"there is nothing at {pattern}")
        for path in paths:
            if path.suffix == ".json":
                found += read_study(path)
                continue
            inside = sorted(p.parent for p in path.glob("*/run.json"))
            folders = [path] if (path / "run.json").is_file() else inside
            if not folders:
                raise SystemExit(f"{path} is no run folder: it has no run.json")
            found += [read_run(folder, name or None, metric) for folder in folders]
    names = _names([series for series in found if not series.name])
    return [s if s.name else replace(s, name=names[id(s)]) for s in found]


def _names(unnamed: Sequence[Series]) -> dict[int, str]:
    """Names runs by the settings in which they differ; the seed is none of them."""
    flat = {id(s): _flat(s.facts.settings if s.facts else {}) for s in unnamed}
    keys = sorted({key for settings in flat.values() for key in settings})
    differ = [k for k in keys if len({json.dumps(f.get(k)) for f in flat.values()}) > 1]
    names = {}
    for s in unnamed:
        said = [f"{key}={json.dumps(flat[id(s)].get(key))}" for key in differ]
        names[id(s)] = ", ".join(said) or (s.facts.name if s.facts else "run")
    return names


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if path not in ("run.seed", "run.name", "run.folder", "logging"):
            found |= _flat(inner, path)
    return found


def grouped(series: Sequence[Series]) -> dict[str, list[Series]]:
    """Returns the runs by name, each with its seeds in order."""
    names = dict.fromkeys(s.name for s in series)
    return {n: sorted((s for s in series if s.name == n), key=lambda s: s.seed) for n in names}


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Returns the mean, and the lowest and highest of several."""
    mean = show(statistics.fmean(values))
    if len(values) == 1:
        return "–" if values[0] != values[0] else mean
    return f"{mean} ({show(min(values))} to {show(max(values))})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns Markdown; the first row is the header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def summary_table(groups: Mapping[str, Sequence[Series]], goals: Sequence[float]) -> str:
    """One line per name: seeds, time, the metric at the end, evaluations, and when goals were
    reached."""
    headline = _headline(groups)
    everyone = [run for runs in groups.values() for run in runs]
    stages = [s for s in EVALUATIONS if reports_of(everyone, s)]
    header = ["", "seeds", "updates", "s per update", f"mean of the last {LAST}"]
    header += [f"{headline.name}, {stage.replace('_', ' ')}" for stage in stages]
    rows = [header + [f"to {goal:g}" for goal in goals]]
    for name, runs in groups.items():
        steps = [b.seconds - a.seconds for run in runs for a, b in itertools.pairwise(run.points)]
        pace = f"{statistics.median(steps):.2f}" if steps else "–"
        counts = dict.fromkeys(str(len(run.points)) for run in runs)
        cells = [name, str(len(runs)), ", ".join(counts), pace]
        cells.append(spread([run.end for run in runs], lambda v: f"{v:.3f}"))
        cells += [figure_cell(reports_of(runs, stage), headline) for stage in stages]
        cells += [_goal_cell(runs, goal) for goal in goals]
        rows.append(cells)
    return table(rows)


def reports_of(runs: Sequence[Series], *stages: str) -> list[EvalReport]:
    """The last of these stages that each run has."""
    reports = []
    for run in runs:
        own = [run.facts.reports[s] for s in stages if run.facts and s in run.facts.reports]
        reports += own[-1:]
    return reports


def _headline(groups: Mapping[str, Sequence[Series]]) -> Headline:
    runs = [run for group in groups.values() for run in group if run.facts]
    reports = [r for run in runs if run.facts for r in run.facts.reports.values()]
    return headline_of(reports)


def _shown(figure: Estimate, headline: Headline) -> str:
    return percent(figure) if headline.is_rate else str(figure)


def figure_cell(reports: Sequence[EvalReport], headline: Headline) -> str:
    """One run's figure with its interval; of several runs, the mean and the spread: they play the
    same held-out episodes, so that their intervals may not be joined."""
    if not reports:
        return "–"
    figures = [headline.of(report) for report in reports]
    if len(figures) == 1:
        return _shown(figures[0], headline)
    return spread(
        [f.value for f in figures], lambda v: f"{v:.1%}" if headline.is_rate else f"{v:.3f}"
    )


def _goal_cell(runs: Sequence[Series], goal: float) -> str:
    """The medians, where more than half of the runs came there."""
    there = [mark for mark in (reached(run.points, goal) for run in runs) if mark is not None]
    some = "" if len(there) == len(runs) else f" ({len(there)} of {len(runs)})"
    if len(there) <= len(runs) // 2:
        return f"{len(there)} of {len(runs)}"
    updates, seconds = (statistics.median(mark[i] for mark in there) for i in (0, 1))
    return f"{updates:.0f} updates, {seconds:.1f} s{some}"


def runs_table(series: Sequence[Series]) -> str | None:
    """Every run folder's evaluations with their intervals; None if there are none."""
    rows = [["run", "seed", "stage", "episodes", "", "mean reward"]]
    groups = grouped(series)
    headline = _headline(groups)
    rows[0][4] = headline.name
    for run in itertools.chain.from_iterable(groups.values()):
        for stage, whole in (run.facts.reports if run.facts else {}).items():
            for part, report in whole.parts().items():
                led, count = _shown(headline.of(report), headline), str(len(report.by_episode()))
                name = ", ".join(filter(None, (stage.replace("_", " "), part)))
                rows.append([run.name, str(run.seed), name, count, led, str(report.reward)])
    return table(rows) if len(rows) > 1 else None


def draw(groups: Mapping[str, Sequence[Series]], target: Path, metric: str, smooth: int) -> None:
    """Writes the curves: over updates, with the range over the seeds as a band, and over seconds,
    every run that was alone on its machine for itself."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = any(run.alone for runs in groups.values() for run in runs)
    size = (11 if timed else 7, 4)
    figure, (axes,) = pyplot.subplots(1, 1 + timed, figsize=size, sharey=True, squeeze=False)
    for index, (name, runs) in enumerate(groups.items()):
        colour = f"C{index % 10}"
        curves = [smoothed([p.reward for p in run.points], smooth) for run in runs]
        if not any(curves):
            continue
        columns = list(itertools.zip_longest(*curves))
        there = [[v for v in column if v is not None] for column in columns]
        updates = range(1, len(there) + 1)
        means = [statistics.fmean(values) for values in there]
        axes[0].plot(updates, means, color=colour, label=name)
        if len(runs) > 1:
            low, high = [min(v) for v in there], [max(v) for v in there]
            axes[0].fill_between(updates, low, high, color=colour, alpha=0.2, linewidth=0)
        for run, curve in zip(runs, curves, strict=True):
            if run.alone:
                axes[1].plot([p.seconds for p in run.points], curve, color=colour, alpha=0.8)
    said = "mean reward" if metric == METRIC else metric
    axes[0].set(xlabel="update", ylabel=f"{said}, mean of {smooth} updates")
    if timed:
        axes[1].set(xlabel="seconds, from the start of the first update")
    axes[0].legend(fontsize=8, frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def how_it_was_run(
    groups: Mapping[str, Sequence[Series]], made_by: str, settings_of: int | None = None
) -> list[str]:
    """Returns the paragraphs that let anybody run it again; with the settings of the first
    `settings_of` names, if the commands say how the others differ."""
    runs = [run for group in groups.values() for run in group if run.facts]
    facts = [run.facts for run in runs if run.facts]
    dates = sorted({str(f.origin["started"])[:10] for f in facts if f.origin.get("started")})
    machines = list(dict.fromkeys(run.machine for run in runs if run.machine))
    versions = list(
        dict.fromkeys(
            ", ".join(f"{n} {v}" for n, v in f.origin.get("versions", {}).items()) for f in facts
        )
    )
    commits = {
        f.origin["git"]["commit"][:12] + " with changes" * bool(f.origin["git"]["dirty"])
        for f in facts
        if f.origin.get("git")
    }
    said = [" and ".join(machines), " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))]
    found = ["## How it was run"] if facts else []
    if any(said):
        found.append(", ".join(filter(None, said)) + ".")
    found += [f"- {line}" for line in versions if line]
    if commits:
        found.append(f"Commit {', '.join(sorted(commits))}.")
    commands = list(dict.fromkeys(_command(f) for f in facts if f.origin.get("command")))
    found.append("```bash\n" + "\n".join([*commands, made_by]) + "\n```")
    for name, group in itertools.islice(groups.items(), settings_of):
        first = group[0].facts
        if first is not None:
            settings = json.dumps(first.chosen(), indent=2, ensure_ascii=False)
            found += [f"Settings of {name} that are not the defaults:", f"```json\n{settings}\n```"]
    warnings = dict.fromkeys(f"{f.name}: {w}" for f in facts for w in f.warnings)
    return found + [f"- **Warning** of {sentence}" for sentence in warnings]


def _command(facts: RunFacts) -> str:
    program, *words = facts.origin["command"]
    program = "ludic" if program in ("__main__.py", "ludic") else f"python {program}"
    return shlex.join([*program.split(), *words])
