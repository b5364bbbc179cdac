"""`ludic sft`: the supervised part of a run."""

from __future__ import annotations

from ludic.cli.arguments import DryRun, Out, Overrides, RunFile
from ludic.cli.train import print_or_carry_out


def sft(
    run: RunFile, overrides: Overrides = None, out: Out = None, dry_run: DryRun = False
) -> None:
    """Only the supervised part of a run."""
    from ludic.runs.start import plan_run

    settings = [*(overrides or []), "training.steps=0"]
    print_or_carry_out(plan_run(run, settings, only_sft=True), out, dry_run)
