"""A run's held-out episodes, and the reports of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ludic.errors import ConfigError
from ludic.eval import EvalReport, RolloutEvaluator, eval_requests, reward_above
from ludic.interaction import Runtime
from ludic.rollouts import RolloutEngine, RolloutRequest
from ludic.rollouts.progress import ProgressCallback
from ludic.runs.episodes import inference_spec, requests_of, rollout_engine
from ludic.runs.settings import RunConfig
from ludic.seeding import derive_seed


def read_report(path: Path) -> EvalReport:
    """Reads a report from its file, or from a run folder that of its last stage."""
    if path.is_dir():
        stages = ("after_rl", "after_sft", "before")
        reports = [path / "eval" / f"{s}.json" for s in stages]
        path = next((file for file in reports if file.is_file()), reports[0])
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


def eval_engine(config: RunConfig, runtime: Runtime) -> RolloutEngine:
    """Returns an engine that samples as the evaluation does, perhaps at another temperature."""
    inference = inference_spec(config, temperature=config.eval.temperature, trained_on=False)
    return rollout_engine(config, replace(runtime, inference=inference))


async def evaluate_policy(
    config: RunConfig, runtime: Runtime, *, name: str, on_progress: ProgressCallback | None = None
) -> EvalReport:
    """Plays the held-out episodes with the policy as it is now."""
    above = config.eval.success_above
    evaluator = RolloutEvaluator(
        eval_engine(config, runtime),
        eval_plan(config),
        max_steps=config.training.max_steps,
        name=name,
        concurrency=config.concurrency,
        on_progress=on_progress,
        success=None if above is None else reward_above(above),
        outcomes=config.eval.outcomes,
    )
    return await evaluator.evaluate()
