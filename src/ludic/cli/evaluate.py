"""`ludic eval`: held-out episodes with intervals, and paired comparisons."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.arguments import Overrides
from ludic.errors import ConfigError


def evaluate(
    run: Annotated[str | None, typer.Argument(help="A run folder, a run file or a name.")] = None,
    overrides: Overrides = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two reports, or run folders, to compare seed by seed."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option(min=1, help="Also pass@k, for this k; may be repeated.")
    ] = None,
) -> None:
    """Play held-out episodes and report rates with intervals, or compare two reports."""
    from ludic.eval import report_table
    from ludic.runs.playing import evaluate_run
    from ludic.runs.results.terminal import console, say

    if compare is not None:
        _compare(*compare)
        return
    if run is None:
        raise ConfigError("name a run folder, a run file or a built-in run; or use --compare A B")
    if output is not None:
        _check_output(output)
    report = asyncio.run(evaluate_run(run, overrides or []))
    console.print(report_table([report]))
    if output is not None:
        output.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        say(f"wrote {output}")
    for k in pass_at or []:
        say(f"pass@{k}: {report.pass_at(k)}")


def _check_output(path: Path) -> None:
    """Raises where no file can be written, before episodes are played for it."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written: permission denied")


def _compare(a: Path, b: Path) -> None:
    from ludic.eval import report_table
    from ludic.eval.report import leading_tests
    from ludic.runs.evaluation import read_report
    from ludic.runs.results.terminal import console, say

    reports = [read_report(a), read_report(b)]
    console.print(report_table(reports))
    for name, result in leading_tests(*reports).items():
        d = result.difference
        say(
            f"{name}: B - A = {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}], "
            f"paired permutation test p = {result.p_value:.4f}"
        )
