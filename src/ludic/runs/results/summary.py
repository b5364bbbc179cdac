"""The results of a run: figures of its stages, its reward over time, and a plot of both."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ludic.eval import EvalReport, headline_of

Curve: TypeAlias = tuple[list[float], list[float]]
"""The steps, and one metric's values at them."""


def outcomes_of(reports: Iterable[EvalReport]) -> list[str]:
    """Returns the names of all outcomes, the usual ones first."""
    found = {e.outcome for report in reports for e in report.episodes if e.outcome is not None}
    usual = [name for name in ("win", "draw", "loss", "illegal") if name in found]
    return usual + sorted(found - set(usual))


def summary_of(reports: Mapping[str, EvalReport], outcomes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns each stage's leading figure and mean reward, and under `roles` and `envs` the same
    for each agent and environment, if there are several. `outcomes` are what the run names."""
    lead = headline_of(reports.values(), outcomes)
    metric = lead.outcome or lead.kind
    parts: dict[str, dict[str, dict[str, Any]]] = {"roles": {}, "envs": {}}
    summary: dict[str, Any] = {"headline": metric, "headline_kind": lead.kind}
    for stage, whole in reports.items():
        places = [(summary, whole)]
        for kind, found in (("roles", whole.roles()), ("envs", whole.envs())):
            places += [(parts[kind].setdefault(name, {}), part) for name, part in found.items()]
        for into, report in places:
            for name, figure in ((metric, lead.of(report)), ("reward", report.reward)):
                bounds = {"value": figure.value, "low": figure.low, "high": figure.high}
                into[f"{name}_{stage}"] = bounds
    summary |= {kind: found for kind, found in parts.items() if found}
    summary["episodes"] = {stage: len(report.by_episode()) for stage, report in reports.items()}
    return summary


def read_curve(metrics: Path, key: str) -> Curve:
    """Reads the steps and values of one metric."""
    steps: list[float] = []
    values: list[float] = []
    if metrics.is_file():
        for line in metrics.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            value = row.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                steps.append(float(row.get("train/step", len(steps) + 1)))
                values.append(float(value))
    return steps, values


def smoothed(values: Sequence[float], window: int = 8) -> list[float]:
    """Returns the trailing mean, in which a trend can be seen."""
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / (i + 1 - max(0, i - window + 1))
        for i in range(len(values))
    ]


def plot_png(path: Path, curve: Curve, summary: dict[str, Any]) -> bool:
    """Plots the reward over steps beside the stages' rates; False if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # without pyplot, which takes long to import
    except ImportError:
        return False
    metric = summary["headline"]
    stages = [k.removeprefix(f"{metric}_") for k in summary if k.startswith(f"{metric}_")]
    figure = Figure(figsize=(9.6, 3.6))
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    steps, values = curve
    left.plot(steps, values, color="#b8c4d6", linewidth=1, label="each update")
    left.plot(steps, smoothed(values), color="#1f4e9c", linewidth=2, label="mean of 8")
    left.set(xlabel="update", ylabel="mean reward of the episodes", title="Learning")
    left.legend(frameon=False, loc="lower right")
    rates = [summary[f"{metric}_{stage}"] for stage in stages]
    heights = [rate["value"] for rate in rates]
    errors = [
        [rate["value"] - rate["low"] for rate in rates],
        [rate["high"] - rate["value"] for rate in rates],
    ]
    colours = ["#c9ced6", "#8fa9d1", "#1f4e9c"][-len(stages) :]
    right.bar(range(len(stages)), heights, yerr=errors, capsize=4, color=colours)
    right.set_xticks(range(len(stages)), [stage.replace("_", "\n") for stage in stages])
    label = "mean reward" if summary["headline_kind"] == "reward" else f"{metric} rate"
    right.set(ylabel=f"{label}, 95 % interval", title="Held-out episodes")
    if summary["headline_kind"] != "reward":
        right.set(ylim=(0, 1))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.09, right=0.99, bottom=0.17, top=0.91, wspace=0.3)
    figure.savefig(path, dpi=130)
    return True
