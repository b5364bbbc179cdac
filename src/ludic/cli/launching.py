"""`ludic launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.training import RUN_FILE, Out, Overrides
from ludic.errors import ConfigError


def launch(
    run: Annotated[str | None, RUN_FILE] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    stop: Annotated[
        Path | None, typer.Option(help="Stop the launched run in this folder, with a checkpoint.")
    ] = None,
    attach: Annotated[
        Path | None, typer.Option(help="Show what the launched run in this folder says.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave it running in the background.")
    ] = False,
    write: Annotated[
        str | None,
        typer.Option(help="Start nothing: print a job file, `slurm` or `kuberay`, that does."),
    ] = None,
) -> None:
    """Train a run with all its processes: trainer, servers and actors, on a Ray cluster or here."""
    from ludic.runs.pipeline import attaching

    settings = list(overrides or [])
    if run is not None and "=" in run:
        settings.insert(0, run)
        run = None
    named = [folder for folder in (resume, stop, attach) if folder is not None]
    if len(named) + (run is not None) > 1:
        raise ConfigError("give one of a run file, --resume, --stop and --attach")
    if write is not None:
        if named or detach or run is None:
            raise ConfigError("--write takes a run file, and nothing else that starts or stops one")
        typer.echo(attaching.job_file(write, run, settings, out=out), nl=False)
    elif stop is not None:
        attaching.stop(stop)
    elif attach is not None:
        attaching.attach(attach)
    else:
        attaching.launch(run, settings, out=out, resume=resume, detach=detach)
