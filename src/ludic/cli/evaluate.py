"""`ludic eval`: held-out episodes with intervals, and paired comparisons."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ludic.cli.assemble import Policy, inference_spec, open_policy, requests_of
from ludic.cli.locate import locate
from ludic.cli.run_file import RunConfig
from ludic.cli.show import console, episodes_bar, say
from ludic.errors import ConfigError
from ludic.eval import EvalReport, RolloutEvaluator, eval_requests, report_table
from ludic.eval import compare as compare_reports
from ludic.rollouts import RolloutEngine, RolloutRequest
from ludic.rollouts.progress import ProgressCallback
from ludic.seeding import derive_seed


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


def read_report(path: Path) -> EvalReport:
    """A report's file, or the last stage's report of a run folder."""
    if path.is_dir():
        stages = ("after_rl", "after_sft", "before")
        found = [path / "eval" / f"{s}.json" for s in stages]
        path = next((f for f in found if f.is_file()), found[0])
    try:
        report = EvalReport.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} is no report of `ludic eval`: {exc}") from exc
    return replace(report, name=str(path))


def eval_plan(config: RunConfig) -> list[RolloutRequest]:
    """The held-out episodes of a run: fixed by its evaluation seed, whatever the run's seed."""
    mix = list(requests_of(config, held_out=True).values())
    share = -(-config.eval.episodes // len(mix))
    plan: list[RolloutRequest] = []
    for index, (request, _) in enumerate(mix):
        plan += eval_requests(
            request,
            min(share, config.eval.episodes - len(plan)),
            seed=derive_seed(config.eval.seed, "env", index),
            samples_per_task=config.eval.samples_per_task,
        )
    return plan


def eval_engine(config: RunConfig, policy: Policy) -> RolloutEngine:
    """Samples as the evaluation does, which may be at another temperature."""
    inference = inference_spec(config, temperature=config.eval.temperature, trained_on=False)
    return RolloutEngine(runtime=replace(policy.runtime, inference=inference))


async def evaluate_policy(
    config: RunConfig, policy: Policy, *, name: str, on_progress: ProgressCallback | None = None
) -> EvalReport:
    """The held-out episodes with the present policy."""
    evaluator = RolloutEvaluator(
        eval_engine(config, policy),
        eval_plan(config),
        max_steps=config.training.max_steps,
        name=name,
        concurrency=config.training.concurrency,
        on_progress=on_progress,
    )
    return await evaluator.evaluate()
