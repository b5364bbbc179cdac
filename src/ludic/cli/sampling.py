"""`ludic launch`, `actor`, `pipeline` and `serve`: a run's processes, and those that
sample for it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.looking import AnyRun
from ludic.cli.training import RUN_FILE, Out, Overrides
from ludic.errors import ConfigError

RedisUrl = Annotated[str | None, typer.Option(help="The URL of Redis; default: LUDIC_REDIS_URL.")]


def actor(
    run: AnyRun,
    overrides: Overrides = None,
    url: RedisUrl = None,
    name: Annotated[str | None, typer.Option(help="This actor's name.")] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="A vLLM server; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The folder of the tokenizer, if not the model's.")
    ] = None,
) -> None:
    """Sample for a run, alongside any number of other actors, until it ends."""
    from ludic.runs.pipeline.acting import act_for

    report = asyncio.run(
        act_for(run, overrides or [], url=url, name=name, servers=server or [], tokenizer=tokenizer)
    )
    print(
        f"{report.name}: {report.groups} groups, {report.episodes} episodes, {report.tokens} "
        f"tokens; left because {report.why}",
        flush=True,
    )


ANSWER_S = 5.0
"""How long a Redis that does not answer is waited for."""

pipeline = typer.Typer(help="Inspect a run over Redis.", no_args_is_help=True)


@pipeline.callback()
def look() -> None:
    """Inspect a run over Redis."""


@pipeline.command()
def status(
    run: AnyRun,
    overrides: Overrides = None,
    url: RedisUrl = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show trainer, actors, rates, lag, backlog, ages and drops, live."""
    from rich.live import Live

    from ludic.pipeline.status import read_status, status_table
    from ludic.pipeline.store import Store
    from ludic.runs.locate import read_run
    from ludic.runs.pipeline.address import find_pipeline, where_it_stands
    from ludic.runs.results.terminal import console

    config, _, opened = read_run(run, overrides or [])
    folder = opened.path if opened else None
    # One who looks is answered at once, also with "it does not answer".
    where = replace(find_pipeline(config, folder, url), patience_s=ANSWER_S, call_s=ANSWER_S)

    def stands() -> str:
        return where_it_stands(config, folder) if folder is not None else ""

    with closing(Store(where)) as store, suppress(KeyboardInterrupt):
        state = read_status(store)
        if as_json:
            print(json.dumps({**asdict(state), "alive": state.alive, "run": stands()}))
        elif once or not console.is_terminal:
            console.print(status_table(state, run=stands()))
        else:
            before = None
            with Live(status_table(state, run=stands()), console=console) as live:
                while True:
                    time.sleep(every)
                    before, state = state, read_status(store)
                    live.update(status_table(state, before, run=stands()))


def serve(context: typer.Context) -> None:
    """Serve a model with vLLM, ready for live weight updates (`ludic serve --help`)."""
    from ludic.runs.pipeline.serving import serve

    raise SystemExit(serve(context.args))


def launch(
    run: Annotated[str | None, RUN_FILE] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    stop: Annotated[
        Path | None, typer.Option(help="Stop the launched run in this folder, with a checkpoint.")
    ] = None,
    attach: Annotated[
        Path | None, typer.Option(help="Show the output of the launched run in this folder.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave it running in the background.")
    ] = False,
    write: Annotated[
        str | None,
        typer.Option(help="Print a job file for `slurm` or `kuberay` instead of starting."),
    ] = None,
) -> None:
    """Train a run with all its processes: trainer, servers and actors, on a Ray cluster or here."""
    from ludic.runs.pipeline import attaching
    from ludic.runs.run import Run

    settings = list(overrides or [])
    if run is not None and "=" in run:
        settings.insert(0, run)
        run = None
    named = [folder for folder in (resume, stop, attach) if folder is not None]
    if len(named) + (run is not None) > 1:
        raise ConfigError("give a run file, --resume, --stop or --attach, and only one of them")
    if write is not None:
        if named or detach or run is None:
            raise ConfigError("--write needs a run file, and no other action")
        typer.echo(attaching.job_file(write, run, settings, out=out), nl=False)
    elif stop is not None:
        attaching.stop(stop)
    elif attach is not None:
        attaching.attach(attach)
    else:
        plan = (
            Run.from_folder(resume, settings) if resume else Run.from_file(run, settings, out=out)
        )
        attaching.launch_run(plan, detach=detach)
