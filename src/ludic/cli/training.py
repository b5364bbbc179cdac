"""`ludic train`, `sft`, `actor`, `pipeline` and `serve`: the processes of a run."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludic.cli.arguments import RUN_FILE, AnyRun, DryRun, Out, Overrides, RedisUrl, RunFile

if TYPE_CHECKING:
    from ludic.runs.run import Run


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
    from ludic.errors import ConfigError
    from ludic.runs.run import Run

    settings = list(overrides or [])
    if asynchronous and resume is not None:
        raise ConfigError("--resume continues the run as it began: leave --async out")
    if asynchronous:
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
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show trainer, actors, rates, lag, backlog, ages and drops, live."""
    from rich.live import Live

    from ludic.pipeline.store import Store
    from ludic.runs.pipeline.address import find_pipeline, read_run, where_it_stands
    from ludic.runs.pipeline.status import read_status, status_table
    from ludic.runs.results.terminal import console

    config, _, folder = read_run(run, overrides or [])
    # One who looks is answered at once, also with "it does not answer".
    store = Store(replace(find_pipeline(config, folder, url), patience_s=ANSWER_S, call_s=ANSWER_S))

    def stands() -> str:
        return where_it_stands(config, folder) if folder is not None else ""

    try:
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
    except KeyboardInterrupt:
        pass
    finally:
        store.close()


def serve(context: typer.Context) -> None:
    """Serve a model with vLLM, ready for live weight updates (`ludic serve --help`)."""
    from ludic.inference.vllm.server import main

    raise SystemExit(main(context.args))
