"""Evaluating a run: its held-out episodes, and the reports that its stages leave behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ludic.errors import ConfigError
from ludic.eval import EvalReport, RolloutEvaluator, eval_requests, reward_above
from ludic.rollouts import RolloutEngine, RolloutRequest
from ludic.rollouts.progress import ProgressCallback
from ludic.runs.assemble import OpenPolicy, open_policy
from ludic.runs.episodes import inference_spec, rollout_engine
from ludic.runs.execution.check import check_programs
from ludic.runs.locate import locate
from ludic.runs.requests import requests_of
from ludic.runs.results.terminal import episodes_bar
from ludic.runs.settings import RunConfig
from ludic.seeding import derive_seed


def read_report(path: Path) -> EvalReport:
    """Reads a report from its file, or from a run folder that of its last stage."""
    if path.is_dir():
        stages = ("after_rl", "after_sft", "before")
        found = [path / "eval" / f"{s}.json" for s in stages]
        path = next((f for f in found if f.is_file()), found[0])
    try:
        report = EvalReport.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} is not a report of `ludic eval`: {exc}") from exc
    return replace(report, name=str(path))


def eval_plan(config: RunConfig) -> list[RolloutRequest]:
    """Returns the run's held-out episodes. They depend on its evaluation seed alone."""
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


def eval_engine(config: RunConfig, policy: OpenPolicy) -> RolloutEngine:
    """Returns an engine that samples as the evaluation does, perhaps at another temperature."""
    inference = inference_spec(config, temperature=config.eval.temperature, trained_on=False)
    return rollout_engine(config, replace(policy.runtime, inference=inference))


async def evaluate_policy(
    config: RunConfig, policy: OpenPolicy, *, name: str, on_progress: ProgressCallback | None = None
) -> EvalReport:
    """Plays the held-out episodes with the current policy."""
    above = config.eval.success_above
    evaluator = RolloutEvaluator(
        eval_engine(config, policy),
        eval_plan(config),
        max_steps=config.training.max_steps,
        name=name,
        concurrency=config.training.concurrency,
        on_progress=on_progress,
        success=None if above is None else reward_above(above),
        outcomes=config.eval.outcomes,
    )
    return await evaluator.evaluate()


async def evaluate_run(run: str, overrides: Sequence[str] = ()) -> EvalReport:
    """Evaluates the trained model of a run folder, or the untrained one of a run file."""
    return await evaluate_model(*locate(run, overrides), name=run)


async def evaluate_model(config: RunConfig, weights: Path | None, *, name: str) -> EvalReport:
    """Evaluates the model that a configuration describes, with the weights of a checkpoint."""
    check_programs(config, held_out=True)
    async with open_policy(config, weights=weights) as policy:
        with episodes_bar("evaluation") as update:
            return await evaluate_policy(config, policy, name=name, on_progress=update)
