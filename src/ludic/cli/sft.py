"""`ludic sft`: the supervised part of a run."""

from __future__ import annotations

from ludic.cli.arguments import DryRun, Out, Overrides, RunFile
from ludic.cli.train import print_or_go


def sft(
    run: RunFile, overrides: Overrides = None, out: Out = None, dry_run: DryRun = False
) -> None:
    """Only the supervised part of a run."""
    from ludic.runs.run import Run

    print_or_go(Run.from_file(run, overrides or [], out=out, only_sft=True), dry_run)
