"""`ludic doctor`: is everything there, and do sampler and trainer agree on the log-probs?"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from ludic.cli.arguments import Overrides


def doctor(
    run: Annotated[str | None, typer.Argument(help="A run folder, a run file or a name.")] = None,
    overrides: Overrides = None,
) -> None:
    """Check the machine and, for a run, that sampler and trainer agree."""
    from rich.table import Table

    from ludic.runs.doctor import examine_run
    from ludic.runs.machine import check_machine
    from ludic.runs.results.terminal import console, say

    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in check_machine():
        table.add_row(fact.name, fact.found, fact.remedy or "")
    console.print(table)
    if run is None:
        return
    report = asyncio.run(examine_run(run, overrides or []))
    say(f"\nlog-probs, trainer against sampler:\n\n{report.table()}")
    over = sum(not row.ok for row in report.rows)
    if over:
        say(f"\n{over} over the budget: this sampler is not the policy that would be trained")
        raise SystemExit(1)
    say("\nall is well")
