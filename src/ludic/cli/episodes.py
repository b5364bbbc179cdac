"""`ludic eval`, `play`, `generate` and `replay`: episodes without training."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.looking import ANY_RUN, AnyRun
from ludic.cli.training import Overrides
from ludic.errors import ConfigError


def evaluate(
    run: Annotated[str | None, ANY_RUN] = None,
    overrides: Overrides = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two reports, or run folders, to compare seed by seed."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option(min=1, help="Also pass@k, for this k; may be repeated.")
    ] = None,
) -> None:
    """Play held-out episodes and report rates with intervals, or compare two reports."""
    from ludic.eval import report_table
    from ludic.runs.playing import evaluate_run
    from ludic.runs.results.terminal import console, say

    if compare is not None:
        _compare(*compare)
        return
    if run is None:
        raise ConfigError("name a run folder, a run file or a built-in run; or use --compare A B")
    if output is not None:
        _check_output(output)
    report = asyncio.run(evaluate_run(run, overrides or []))
    console.print(report_table([report]))
    if output is not None:
        output.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        say(f"wrote {output}")
    for k in pass_at or []:
        say(f"pass@{k}: {report.pass_at(k)}")


def _check_output(path: Path) -> None:
    """Raises where no file can be written, before episodes are played for it."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written: permission denied")


def _compare(a: Path, b: Path) -> None:
    from ludic.eval import report_table
    from ludic.eval.report import leading_tests, read_report
    from ludic.runs.results.terminal import console, say

    reports = [read_report(a), read_report(b)]
    console.print(report_table(reports))
    for name, result in leading_tests(*reports).items():
        d, p = result.difference, result.p_value
        say(
            f"{name}: B - A = {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}], "
            f"paired permutation test p {f'= {p:.4f}' if p >= 1e-4 else '< 0.0001'}"
        )


def play(
    env: Annotated[str, typer.Argument(help="An environment's name, or a run folder.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value, for the environment.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Watch the model of this run folder play.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The episode's seed.")] = 0,
) -> None:
    """Play an environment yourself, or watch a model play it."""
    from ludic.envs import build_env
    from ludic.runs.locate import locate
    from ludic.runs.playing import env_to_play, play_by_hand, watch_model
    from ludic.runs.results.terminal import show_episode

    spec = env_to_play(env, settings or [])
    if model is None:
        raise SystemExit(play_by_hand(build_env(spec), seed=seed))
    show_episode(asyncio.run(watch_model(spec, *locate(model), seed=seed)))


def generate(
    run: AnyRun,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("rollouts.jsonl.zst"),
    episodes: Annotated[int, typer.Option(help="How many episodes to play.")] = 256,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="success, complete or parsed; may be repeated. All must hold."),
    ] = None,
) -> None:
    """Write rollouts that pass a filter, as data for `ludic sft`."""
    from ludic.runs.playing import generate_file
    from ludic.runs.results.terminal import say

    counts = asyncio.run(
        generate_file(run, overrides or [], output=output, episodes=episodes, keep=keep or [])
    )
    dropped = ", ".join(f"{n} {reason}" for reason, n in counts.items() if reason != "kept")
    say(
        f"wrote {counts['kept']} of {counts.total()} rollouts to {output}"
        + (f"; dropped: {dropped}" if dropped else "")
    )


def replay(
    rollouts: Annotated[Path, typer.Argument(help="A file of rollouts.")],
    limit: Annotated[int, typer.Option(min=1, help="At most this many episodes.")] = 100,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Also sample again with this run folder's model: only episodes that these weights "
            "sampled, and no earlier ones, can match."
        ),
    ] = None,
) -> None:
    """Run recorded episodes again and report the first divergence."""
    from ludic.runs.playing import replay_file
    from ludic.runs.results.terminal import say

    counts = asyncio.run(replay_file(rollouts, limit=limit, model=model, on_divergence=say))
    what = f"{counts['steps']} steps" + (f", {counts['tokens']} tokens" if model else "")
    same, others, diverged = (counts[name] for name in ("same", "others", "diverged"))
    say(f"{same} of {same + others + diverged} episodes match ({what} compared)")
    if others:
        say(f"{others} episodes had other models in them, and cannot be replayed")
    raise SystemExit(1 if diverged else 0)
