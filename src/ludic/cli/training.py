"""`ludic train` and `sft`, and the arguments that they share with other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludic.errors import ConfigError

if TYPE_CHECKING:
    from ludic.runs.run import Run

RUN_FILE = typer.Argument(help="A run file (TOML), or the name of a built-in run.")
RunFile = Annotated[str, RUN_FILE]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="The run folder to create.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved run, and stop.")]


def train(
    run: Annotated[str | None, RUN_FILE] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    dry_run: DryRun = False,
    asynchronous: Annotated[
        bool,
        typer.Option(
            "--async", help="Run actors and trainer as separate processes, joined by Redis."
        ),
    ] = False,
) -> None:
    """Train an agent: cold start if the run has one, RL, evaluation."""
    from ludic.runs.run import Run
    from ludic.runs.settings import find_run

    settings = list(overrides or [])
    if asynchronous and resume is not None:
        raise ConfigError("--resume continues a run as it was started: leave --async out")
    if asynchronous and run is not None and find_run(run, settings)[0].pipeline is None:
        settings.insert(0, "pipeline={}")
    if resume is None:
        plan = Run.from_file(run, settings, out=out)
    else:
        if run is not None and "=" in run:
            settings.insert(0, run)
            run = None
        if run is not None or out is not None:
            raise ConfigError("--resume takes the run from its folder: give no run file or --out")
        plan = Run.from_folder(resume, settings)
    print_or_go(plan, dry_run)


def print_or_go(run: Run, dry_run: bool) -> None:
    """Prints a resolved run where only that was asked for, and trains it otherwise."""
    from ludic.sharding.ranks import launched

    if not dry_run:
        run.go()
    elif launched().leads:
        print(json.dumps(run.config.plain(), indent=2))


def sft(
    run: RunFile, overrides: Overrides = None, out: Out = None, dry_run: DryRun = False
) -> None:
    """Run only the supervised part of a run."""
    from ludic.runs.run import Run

    print_or_go(Run.from_file(run, overrides or [], out=out, only_sft=True), dry_run)
