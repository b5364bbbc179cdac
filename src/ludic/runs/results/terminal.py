"""What a run shows on a terminal: progress, a table, a plot, one episode in the model's words."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ludic.eval import Estimate, EvalReport, Headline, headline_of
from ludic.eval import episodes_bar as eval_bar
from ludic.plumbing.text import visible
from ludic.runs.results.summary import Curve, outcomes_of, smoothed
from ludic.types import AgentStep, Rollout, ToolCall


class PlainConsole(Console):
    """What is shown is mostly the words of environments and models: their brackets are only
    brackets, and their control characters are written out and not obeyed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


console = PlainConsole()
episodes_bar = partial(eval_bar, console=console)
BLOCKS = " ▁▂▃▄▅▆▇█"


def command_name() -> str:
    """Returns how to call this command from here: `ludic`, the path to it, or by its module."""
    if shutil.which("ludic"):
        return "ludic"
    script = Path(sys.executable).parent / "ludic"
    return os.path.relpath(script) if script.is_file() else f"{sys.executable} -m ludic.cli"


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
    named = dict.fromkeys([*outcomes, *outcomes_of(reports.values())])
    columns = dict.fromkeys([lead, *(Headline("outcome", name) for name in named)])
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
    width = min(console.width - 12, 68, len(values))
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
