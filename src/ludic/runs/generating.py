"""Rollouts of a run's model as a file to train on, filtered by rejection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ludic.errors import ConfigError, UnknownNameError
from ludic.eval.headline import USUAL
from ludic.rollouts import FixedMix, RolloutWriter
from ludic.rollouts.storage import write_rollouts
from ludic.runs.assemble import open_policy
from ludic.runs.episodes import rollout_engine
from ludic.runs.execution.check import check_programs
from ludic.runs.locate import locate
from ludic.runs.requests import requests_of
from ludic.runs.results.terminal import episodes_bar
from ludic.runs.settings import RunConfig
from ludic.seeding import derive_seed
from ludic.types import FinishReason, Rollout


def succeeded(config: RunConfig, rollout: Rollout) -> bool:
    """Whether an episode succeeded, by what the evaluation of the run counts as that."""
    if config.eval.success_above is not None:
        return rollout.total_reward > config.eval.success_above
    steps = rollout.env_steps
    outcome = steps[-1].info.get("result") if steps else None
    if config.eval.outcomes:
        return outcome == config.eval.outcomes[0]
    if outcome is None and steps and steps[-1].terminated:
        raise ConfigError(
            "--keep success: the environment does not say how its episodes end; set "
            "eval.success_above to the reward above which one succeeded, as in eval.success_above=0"
        )
    return outcome in USUAL


KEEP: Mapping[str, Callable[[RunConfig, Rollout], bool]] = {
    "success": succeeded,
    "complete": lambda _, rollout: (
        not rollout.truncated
        and all(step.finish_reason is not FinishReason.LENGTH for step in rollout.agent_steps)
    ),
    "parsed": lambda _, rollout: not any(s.info.get("parse_error") for s in rollout.env_steps),
}
"""The filters by name. A failed episode is never kept, whatever the filter."""


async def generate_file(
    run: str, overrides: Sequence[str], *, output: Path, episodes: int, keep: Sequence[str]
) -> Counter[str]:
    """Plays `episodes` episodes and writes the rollouts that pass every filter in `keep`. Returns
    how many were kept, and how many were dropped, by reason."""
    _check(output, episodes, keep)
    config, weights = locate(run, overrides)
    check_programs(config)
    seed = derive_seed(config.run.seed, "generate")
    counts: Counter[str] = Counter(kept=0)
    async with open_policy(config, weights=weights) as policy:
        engine = rollout_engine(config, policy.runtime, seed=seed)
        requests = FixedMix(requests_of(config), seed=seed).next_requests(episodes)
        with episodes_bar("generating") as update, RolloutWriter(output) as writer:
            async for rollout in engine.stream_rollouts(
                requests,
                max_steps=config.training.max_steps,
                concurrency=config.training.concurrency,
                on_progress=update,
            ):
                failed = [name for name in keep if not KEEP[name](config, rollout)]
                reason = "failed" if rollout.error else f"not {failed[0]}" if failed else "kept"
                counts[reason] += 1
                if reason == "kept":
                    await write_rollouts(writer, [rollout])
    return counts


def _check(output: Path, episodes: int, keep: Sequence[str]) -> None:
    if episodes < 1:
        raise ConfigError(f"--episodes {episodes}: must be at least 1")
    for name in keep:
        if name not in KEEP:
            raise UnknownNameError("--keep", name, KEEP)
    if output.exists():
        raise ConfigError(f"{output} already exists: name another file with --output")
