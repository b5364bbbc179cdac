"""`ludic pipeline status`: how a run over Redis stands."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Annotated

import typer

from ludic.cli.arguments import Overrides, Run

ANSWER_S = 5.0
"""How long a Redis that does not answer is waited for."""

app = typer.Typer(help="Look at a run over Redis.", no_args_is_help=True)


@app.callback()
def pipeline() -> None:
    """Look at a run over Redis."""


@app.command()
def status(
    run: Run,
    overrides: Overrides = None,
    url: Annotated[
        str | None, typer.Option(help="The URL of the Redis; else LUDIC_REDIS_URL.")
    ] = None,
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
        found = read_status(store)
        if as_json:
            print(json.dumps({**asdict(found), "alive": found.alive, "run": stands()}))
        elif once or not console.is_terminal:
            console.print(status_table(found, run=stands()))
        else:
            before = None
            with Live(status_table(found, run=stands()), console=console) as live:
                while True:
                    time.sleep(every)
                    before, found = found, read_status(store)
                    live.update(status_table(found, before, run=stands()))
    except KeyboardInterrupt:
        pass
    finally:
        store.close()
