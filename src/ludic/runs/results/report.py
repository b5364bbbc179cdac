"""What a run's evaluations found, stage by stage: the report, and all that is shown at its end."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ludic.errors import ConfigError
from ludic.eval import EvalReport, headline_of
from ludic.interaction import Runtime
from ludic.plumbing.given import is_given
from ludic.runs.episodes import eval_engine, eval_plan, requests_of
from ludic.runs.results.terminal import (
    PlainConsole,
    command_name,
    console,
    episode_text,
    plot_png,
    plot_terminal,
    read_curve,
    say,
    stages_table,
    summary_of,
    warn,
)
from ludic.runs.settings import RunConfig
from ludic.runs.storage import RunFolder, rollout_file


@dataclass(frozen=True)
class RunReport:
    """The evaluations of a run by stage: `before`, `after_sft`, `after_rl`. Printed, it is a table
    with 95 % intervals. `warnings` say what went wrong, with the setting to look at."""

    stages: Mapping[str, EvalReport]
    outcomes: Sequence[str] = field(default=(), repr=False)
    warnings: Sequence[str] = ()

    @property
    def before(self) -> EvalReport:
        """The untrained policy."""
        return self._stage(0)

    @property
    def after(self) -> EvalReport:
        """The policy after the last stage."""
        return self._stage(-1)

    def _stage(self, index: int) -> EvalReport:
        if not self.stages:
            raise ConfigError("there is no evaluation yet: the run has not started")
        return list(self.stages.values())[index]

    def __str__(self) -> str:
        if not self.stages:
            return "no evaluation yet"
        text = io.StringIO()
        PlainConsole(file=text, width=120).print(stages_table(self.stages, self.outcomes))
        warnings = "".join(f"\nwarning: {sentence}" for sentence in self.warnings)
        return text.getvalue().rstrip() + "\n" * bool(warnings) + warnings

    __repr__ = __str__


async def conclude(
    config: RunConfig,
    folder: RunFolder,
    reports: Mapping[str, EvalReport],
    runtime: Runtime,
    seconds: float,
    warnings: Sequence[str] = (),
) -> None:
    """Writes `summary.json` and `plot.png`, and prints the results."""
    outcomes, path = config.eval.outcomes, folder.path
    summary = summary_of(reports, outcomes)
    summary |= {"seconds": round(seconds, 1), "seed": config.run.seed, "warnings": list(warnings)}
    folder.write_json("summary.json", summary)
    say("")
    mix = requests_of(config, held_out=True)
    for name, (request, _) in mix.items():
        options = ", ".join(f"{k}={v}" for k, v in request.env.kwargs.items())
        called = f"{name}: " if len(mix) > 1 and name != request.env.kind else ""
        say(f"{called}{request.env.kind}" + (f" ({options})" if options else ""))
    of_each = ", of each environment alone" if len(mix) > 1 else ""
    say(f"{config.eval.episodes} held-out episodes, 95 % intervals{of_each}:\n")
    console.print(stages_table(reports, outcomes))
    curve = read_curve(folder.metrics, "train/reward_mean")
    chart = plot_terminal(curve, "mean reward of the training episodes")
    if chart:
        console.print("\n" + chart)
    drawn = plot_png(path / "plot.png", curve, summary)
    if warnings:
        say("")
        for sentence in warnings:
            warn(sentence)
    await _show_an_episode(config, reports, runtime)
    say(f"\n{seconds:.0f} s. Everything is in {path}/ ({'plot.png, ' * drawn}summary.json)")
    _say_what_to_try(config.env[0].kind, path)


def conclude_unmeasured(
    config: RunConfig, folder: RunFolder, seconds: float, warnings: Sequence[str] = ()
) -> None:
    """Writes the summary of a run that had no sampler to measure it with, and says how to."""
    summary = {"seconds": round(seconds, 1), "seed": config.run.seed, "warnings": list(warnings)}
    folder.write_json("summary.json", summary)
    for sentence in warnings:
        warn(sentence)
    say(f"\n{seconds:.0f} s. Everything is in {folder.path}/. No held-out episode was played:")
    say(f"{command_name()} eval {folder.path}   plays them on one rank")


async def _show_an_episode(
    config: RunConfig, reports: Mapping[str, EvalReport], runtime: Runtime
) -> None:
    """Plays one held-out episode again, that which did best by the leading figure, and prints it
    word by word."""
    stage, report = list(reports.items())[-1]
    lead = headline_of(reports.values(), config.eval.outcomes)
    scores = [max(map(lead.value, seats)) for seats in report.by_episode()]
    rollouts = await eval_engine(config, runtime).generate_rollouts(
        [eval_plan(config)[scores.index(max(scores))]], max_steps=config.training.max_steps
    )
    say(f"\nThe best episode {stage.replace('_', ' ')}:")
    say(episode_text(rollouts[0]))


def _say_what_to_try(env: str, path: Path) -> None:
    ludic = command_name()
    lines = [
        f"{ludic} view {path}   look at it in a browser, token by token",
        f"{ludic} init my_env   start your own environment",
    ]
    rollouts = rollout_file(path / "rollouts", "train")
    if not is_given(env):  # an object of the script, which no command knows
        if rollouts.is_file():
            lines.insert(0, f"{ludic} replay {rollouts}   run recorded episodes again")
        lines = [
            f"{ludic} play {env} --model {path}   watch it play",
            f"{ludic} play {env}   play yourself",
            f"{ludic} eval {path} eval.episodes=1000   measure again",
            *lines,
        ]
    say("\n".join(["\nTry next:", *(f"  {line}" for line in lines)]))
