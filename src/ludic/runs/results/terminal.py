"""What a run shows: an update to its callbacks and loggers; on a terminal progress, a table, a
plot, one episode in the model's words; and its reward over time."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ludic.eval import Estimate, EvalReport, Headline, headline_of
from ludic.eval import episodes_bar as eval_bar
from ludic.plumbing.text import visible
from ludic.registry import LOGGERS
from ludic.runs.episodes import requests_of
from ludic.runs.settings import RunConfig
from ludic.runs.settings.base import configuring
from ludic.runs.storage import RunFolder
from ludic.training.metrics.loggers import Logger
from ludic.types import AgentStep, Rollout, ToolCall


class PlainConsole(Console):
    """What is shown is mostly the words of environments and models: their brackets are only
    brackets, their control characters are written out and not obeyed, and what the terminal's
    encoding does not have becomes a question mark."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own
                yield segment
            else:
                shown = visible(segment.text).encode(self.encoding, "replace")
                yield Segment(shown.decode(self.encoding), segment.style)


console = PlainConsole()
episodes_bar = partial(eval_bar, console=console)
BLOCKS = " ▁▂▃▄▅▆▇█"


def command_name() -> str:
    """Returns how to call this command from here: `ludic`, the path to it, or by its module."""
    if shutil.which("ludic"):
        return "ludic"
    script = Path(sys.executable).parent / "ludic"
    return os.path.relpath(script) if script.is_file() else f"{sys.executable} -m ludic"


def say(text: str | Text) -> None:
    """Prints a line as it is, unwrapped, so that paths can be copied."""
    console.print(text, soft_wrap=True)


def warn(sentence: str) -> None:
    """Prints a warning, so that it stands out."""
    say(Text.assemble(("warning:", "bold yellow"), f" {sentence}"))


def print_names(names: Mapping[str, str]) -> None:
    """Prints names, each with one line about it."""
    width = max(map(len, names), default=0)
    for name, line in names.items():
        sys.stdout.write(f"{name:<{width}}  {line}\n")


def stages_table(reports: Mapping[str, EvalReport], outcomes: Sequence[str] = ()) -> Table:
    """Returns a table with a row per stage (and environment and role, if there are several), and
    figures with their intervals as columns: the leading one, the other outcomes, and the rest."""
    lead = headline_of(reports.values(), outcomes)
    names = dict.fromkeys([*outcomes, *outcomes_of(reports.values())])
    columns = dict.fromkeys([lead, *(Headline("outcome", name) for name in names)])
    episodes = [e for report in reports.values() for e in report.episodes]
    silent = {e.env for e in episodes} - {e.env for e in episodes if e.outcome} - {None}
    table = Table(title=None, box=None, pad_edge=False, header_style="bold", leading=1)
    table.add_column("")
    for column in columns:
        table.add_column(column.name.replace("_", " "), justify="right")
    table.add_column("parse failure", justify="right")
    if lead.is_rate:
        table.add_column("mean reward", justify="right")
    for stage, whole in reports.items():
        for part, report in whole.parts().items():
            failures = report.rate(lambda e: e.parse_failures > 0)
            table.add_row(
                stage.replace("_", " ") + (f", {part}" if part else ""),
                *(
                    Text("–")  # another environment's ending
                    if column.kind == "outcome" and report.episodes[0].env in silent
                    else _figure(column, report)
                    for column in columns
                ),
                _percent(failures),
                *([_figure(Headline("reward"), report, digits=1)] if lead.is_rate else []),
            )
    return table


def _figure(headline: Headline, report: EvalReport, digits: int = 2) -> Text:
    estimate = headline.of(report)
    if headline.is_rate:
        return _percent(estimate)
    return _over(
        f"{estimate.value:+.2f}", f"{estimate.low:+.{digits}f} to {estimate.high:+.{digits}f}"
    )


def _percent(rate: Estimate) -> Text:
    return _over(f"{rate.value:.1%}", f"{100 * rate.low:.0f} to {100 * rate.high:.0f}")


def _over(value: str, interval: str) -> Text:
    return Text.assemble(value, "\n", (interval, "dim"))


def plot_terminal(curve: Curve, title: str, *, height: int = 8) -> str:
    """Draws a curve in characters, with one column per update or per few of them."""
    steps, values = curve
    if len(steps) < 2:
        return ""
    width = min(max(console.width - 12, 1), 68, len(values))
    course = smoothed(values)
    columns = [course[round(i * (len(course) - 1) / max(width - 1, 1))] for i in range(width)]
    low, high = min(columns), max(columns)
    scale = (height * 8 - 1) / (high - low) if high > low else 0.0
    filled = [1 + round((value - low) * scale) for value in columns]
    rows = []
    for row in reversed(range(height)):
        blocks = "".join(BLOCKS[min(max(n - 8 * row, 0), 8)] for n in filled)
        label = high if row == height - 1 else low if row == 0 else None
        rows.append(f"{'' if label is None else f'{label:+.2f}':>8} │{blocks}")
    axis = f"{'':>8} └{'─' * width}\n{'':>9}update {steps[0]:.0f}{steps[-1]:>{width - 8}.0f}"
    return "\n".join([f"{'':>9} {title}", *rows, axis])


def episode_text(rollout: Rollout) -> Text:
    """Formats an episode as a dialogue: what the agent saw, and every word it wrote."""
    lines: list[Text | str] = []
    for step in rollout.steps:
        if isinstance(step, AgentStep):
            for message in step.new_messages:
                if message["role"] == "user":
                    lines += ["", *(f"    {line}" for line in message["content"].splitlines())]
            lines += ["", Text.assemble("  ", ("model:", "bold"), f" {step.message['content']}")]
            lines += [f"  calls: {_call_text(call)}" for call in step.message.get("tool_calls", ())]
            lines += [f"  tool: {m['content']}" for m in step.tool_messages]
        elif step.terminated or step.truncated:
            lines += ["", *(f"    {line}" for line in step.next_obs.splitlines())]
    lines += ["", f"  total reward {rollout.total_reward:+g}"]
    return Text("\n").join(Text(line) if isinstance(line, str) else line for line in lines)


def show_episode(rollouts: Sequence[Rollout]) -> None:
    """Prints the rollouts of one episode, each under its agent's name if there are several."""
    for rollout in rollouts:
        say(Text(str(rollout.agent_id), "bold") if len(rollouts) > 1 else "")
        say(episode_text(rollout))


def _call_text(call: ToolCall) -> str:
    function = call["function"]
    arguments = (f"{name}={value!r}" for name, value in function["arguments"].items())
    return f"{function['name']}({', '.join(arguments)})"


Stage = Literal["sft", "rl"]
SHOWN = {
    "sft": ("train/nll", "perf/tokens_per_s"),
    "rl": ("train/reward_mean", "train/loss", "train/entropy", "perf/tokens_per_s"),
}


@dataclass(frozen=True, slots=True)
class Update:
    """One update of a run: its stage, its number in that stage, and its metrics."""

    stage: Stage
    step: int
    metrics: Mapping[str, float]


def shown_metrics(config: RunConfig, stage: Stage) -> tuple[str, ...]:
    """Returns the metrics that a terminal shows while a stage is under way."""
    if stage == "sft":
        return SHOWN[stage]
    keys = list(SHOWN[stage])
    if config.eval.outcomes:
        keys.insert(0, f"train/outcome/{config.eval.outcomes[0]}")
    if config.curriculum.kind == "stages":
        keys.append("train/curriculum_stage")
    names = requests_of(config)
    return (*keys, *(f"train/env/{name}/reward_mean" for name in names if len(names) > 1))


def make_loggers(config: RunConfig, folder: RunFolder, stage: Stage) -> list[Logger]:
    """Returns the loggers that a stage of the run names, besides `metrics.jsonl`."""
    keys = shown_metrics(config, stage)
    steps = config.sft.steps if stage == "sft" and config.sft else config.training.steps
    of_this_run: dict[str, dict[str, Any]] = {
        "live": {"keys": keys, "total_steps": steps, "console": console},
        "console": {"keys": keys, "every": max(steps // 10, 1)},
        "trackio": {"name": folder.path.name},
        "tensorboard": {"folder": folder.path / "tensorboard"},
    }
    loggers: list[Logger] = []
    for entry in config.logging.loggers:
        options = {"kind": entry} if isinstance(entry, str) else dict(entry)
        if options.get("kind") == "live" and not console.is_terminal:
            options = {"kind": "console"}
        with configuring(f"logging.loggers: {entry!r}"):
            usual = of_this_run.get(str(options.get("kind")), {})
            loggers.append(LOGGERS.make_from({**usual, **options}))
    return loggers


class LastingLogger:
    """Stands for a logger that hears all stages of a run, which closes it at the end."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log(metrics, step)

    def close(self) -> None:
        """Another stage may come."""


Curve: TypeAlias = tuple[list[float], list[float]]
"""The steps, and one metric's values at them."""


def outcomes_of(reports: Iterable[EvalReport]) -> list[str]:
    """Returns the names of all outcomes, the usual ones first."""
    names = {e.outcome for report in reports for e in report.episodes if e.outcome is not None}
    usual = [name for name in ("win", "draw", "loss", "illegal") if name in names]
    return usual + sorted(names - set(usual))


def summary_of(reports: Mapping[str, EvalReport], outcomes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns each stage's leading figure and mean reward, and under `roles` and `envs` the same
    for each agent and environment, if there are several. `outcomes` are what the run names."""
    lead = headline_of(reports.values(), outcomes)
    metric = lead.outcome or lead.kind
    parts: dict[str, dict[str, dict[str, Any]]] = {"roles": {}, "envs": {}}
    summary: dict[str, Any] = {"headline": metric, "headline_kind": lead.kind}
    for stage, whole in reports.items():
        places = [(summary, whole)]
        for kind, by_name in (("roles", whole.roles()), ("envs", whole.envs())):
            places += [(parts[kind].setdefault(name, {}), part) for name, part in by_name.items()]
        for into, report in places:
            for name, figure in ((metric, lead.of(report)), ("reward", report.reward)):
                bounds = {"value": figure.value, "low": figure.low, "high": figure.high}
                into[f"{name}_{stage}"] = bounds
    summary |= {kind: by_name for kind, by_name in parts.items() if by_name}
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
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


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


def close_loggers(loggers: Iterable[Logger]) -> None:
    """Closes all of them, whatever one raises."""
    for logger in loggers:
        try:
            logger.close()
        except Exception as exc:
            warn(f"{type(logger).__name__} could not be closed: {type(exc).__name__}: {exc}")
