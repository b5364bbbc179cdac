"""`ludic eval`: held-out episodes with intervals, and paired comparisons."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

from ludic.errors import ConfigError
from ludic.eval import EvalReport, report_table
from ludic.eval import compare as compare_reports
from ludic.runs.assemble import open_policy
from ludic.runs.evaluation import evaluate_policy, read_report
from ludic.runs.locate import locate
from ludic.runs.show import console, episodes_bar, say


def evaluate(
    run: str | None, overrides: Sequence[str], *, output: Path | None, pass_at: Sequence[int]
) -> None:
    """Evaluates a run's trained model, or a run file's model as it comes."""
    if run is None:
        raise ConfigError("name a run folder, a run file or a built-in run; or use --compare A B")
    if output is not None:
        _check_output(output)
    report = asyncio.run(_evaluate(run, overrides))
    console.print(report_table([report]))
    if output is not None:
        output.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        say(f"wrote {output}")
    for k in pass_at:
        say(f"pass@{k}: {report.pass_at(k)}")


def _check_output(path: Path) -> None:
    """Raises where no file can be written, before episodes are played for it."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written: permission denied")


async def _evaluate(run: str, overrides: Sequence[str]) -> EvalReport:
    config, weights = locate(run, overrides)
    async with open_policy(config, weights=weights) as policy:
        with episodes_bar("evaluation") as update:
            return await evaluate_policy(config, policy, name=run, on_progress=update)


def compare(a: Path, b: Path) -> None:
    """B against A on the same seeds, with a paired test."""
    reports = [read_report(a), read_report(b)]
    console.print(report_table(reports))
    for name, result in compare_reports(*reports).items():
        d = result.difference
        say(
            f"{name}: B - A = {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}], "
            f"paired permutation test p = {result.p_value:.4f}"
        )
