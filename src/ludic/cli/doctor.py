"""`ludic doctor`: is everything there, and do sampler and trainer agree on the log-probs?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.table import Table

from ludic.runs.assemble import open_policy
from ludic.runs.doctor import DoctorReport, check_machine, run_doctor
from ludic.runs.locate import locate
from ludic.runs.show import console, say


def doctor(run: str | None, overrides: Sequence[str]) -> None:
    """Prints what it finds; log-probs over their budget are exit code 1."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in check_machine():
        table.add_row(fact.name, fact.found, fact.remedy or "")
    console.print(table)
    if run is None:
        return
    report = asyncio.run(_examine(run, overrides))
    say("\nlog-probs, trainer against sampler:\n")
    say(report.table())
    over = sum(not row.ok for row in report.rows)
    if over:
        say(f"\n{over} over the budget: this sampler is not the policy that would be trained")
        raise SystemExit(1)
    say("\nall is well")


async def _examine(run: str, overrides: Sequence[str]) -> DoctorReport:
    config, weights = locate(run, overrides)
    async with open_policy(config, weights=weights) as policy:
        own = policy.runtime.inference.sampling
        return await run_doctor(
            policy.model,
            policy.tokenizer,
            policy.runtime.client,
            model_name=policy.runtime.model,
            publisher=policy.publisher,
            max_tokens=own.max_tokens or 32,
            temperatures=sorted({own.temperature, 0.7, 1.0} - {0.0}),
        )
