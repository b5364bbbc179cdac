"""`ludic actor`: samples for a run whose trainer is another process."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from ludic.cli.arguments import Overrides, Run


def actor(
    run: Run,
    overrides: Overrides = None,
    url: Annotated[
        str | None, typer.Option(help="The URL of the Redis; else LUDIC_REDIS_URL.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="This actor's name.")] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="A vLLM server; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The folder of the tokenizer, if not the model's.")
    ] = None,
) -> None:
    """Sample for a run, beside any number of other actors, until it ends."""
    from ludic.runs.pipeline.acting import act_for

    report = asyncio.run(
        act_for(run, overrides or [], url=url, name=name, servers=server or [], tokenizer=tokenizer)
    )
    print(
        f"{report.name}: {report.groups} groups, {report.episodes} episodes, {report.tokens} "
        f"tokens; left because {report.why}",
        flush=True,
    )
