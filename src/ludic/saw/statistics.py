"""The statistics in a batch's `meta` about the rollouts it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ludic.saw.items import UNKNOWN_VERSION, SAWItem
from ludic.types import AgentStep, EnvironmentStep, FinishReason, Rollout

ENV, STAGE = "env", "stage"
"""Keys in a rollout's `meta`: its environment, where a run has several, and the stage of the
curriculum that it was played in, counted from 0."""


def rollout_statistics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Rewards, lengths and endings over the rollouts that did not fail, and the rate of those
    that did, as numbers for the log. Where there are several environments, each has its own
    reward; a curriculum has its stage, counted from 1."""
    if not rollouts:
        return {"rollouts_sampled": 0}
    episodes = {r.episode_id or r.id for r in rollouts}
    failed = {r.episode_id or r.id for r in rollouts if r.error is not None}
    stats: dict[str, Any] = {
        "rollouts_sampled": len(rollouts),
        "episodes": len(episodes),
        "failed_episodes": len(failed),
        "failed_rate": len(failed) / len(episodes),
    }
    done = [r for r in rollouts if r.error is None]
    if not done:
        return stats
    calls: list[AgentStep] = []
    acted: list[EnvironmentStep] = []
    rewards, lengths, terminated, truncated, turns, compactions = [], [], 0, 0, 0, 0
    components: dict[str, float] = {}
    for rollout in done:
        length, over, cut = 0, False, False
        own_turns = set()
        for step in rollout.steps:
            if isinstance(step, AgentStep):
                calls.append(step)
                own_turns.add(step.turn_index)
                if step.trace:
                    length += len(step.trace.completion_token_ids)
                continue
            if step.info.get("compacted"):
                compactions += 1
            elif step.agent_steps:
                acted.append(step)
            over = over or step.terminated
            cut = cut or step.truncated
            for name, value in step.reward_components.items():
                components[name] = components.get(name, 0) + value
        rewards.append(rollout.total_reward)
        lengths.append(length)
        terminated += over
        truncated += cut
        turns += len(own_turns)
    n, earned, sizes = len(done), np.array(rewards), np.array(lengths)
    stats |= {
        "reward_mean": float(earned.mean()),
        "reward_std": float(earned.std()),
        "reward_min": float(earned.min()),
        "reward_max": float(earned.max()),
        "turns_mean": turns / n,
        "calls_mean": len(calls) / n,
        "completion_tokens": int(sizes.sum()),
        "completion_tokens_mean": float(sizes.mean()),
        "completion_tokens_max": int(sizes.max()),
        "prompt_tokens_max": max(
            [len(t.prompt_token_ids) for c in calls if (t := c.trace)], default=0
        ),
        "terminated_rate": terminated / n,
        "truncated_rate": truncated / n,
        "parse_error_rate": _rate([s.info.get("parse_error", False) for s in acted]),
        "cut_completion_rate": _rate([c.finish_reason is FinishReason.LENGTH for c in calls]),
        "forks": dict(Counter([str(c.fork.reason) for c in calls if c.fork is not None])),
    }
    if compactions:
        stats["compactions_mean"] = compactions / n
    if (same := _no_variance(done, rewards)) is not None:
        stats["no_variance_group_rate"] = same
    for name, total in sorted(components.items()):
        stats[f"reward_{name}_mean"] = float(total) / n
    return stats | _by_outcome(done) | _by_env(done, rewards) | _stage(done)


def _by_outcome(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The share of each ending that the environment names (`info["result"]` of the last step)."""
    endings = [steps[-1].info.get("result") for r in rollouts if (steps := r.env_steps)]
    counts = Counter(str(ending) for ending in endings if ending is not None)
    return {f"train/outcome/{name}": n / len(rollouts) for name, n in sorted(counts.items())}


def _by_env(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> dict[str, Any]:
    by_env: dict[str, list[float]] = {}
    for rollout, reward in zip(rollouts, rewards, strict=True):
        if (name := rollout.meta.get(ENV)) is not None:
            by_env.setdefault(str(name), []).append(reward)
    stats: dict[str, Any] = {}
    for name, mine in sorted(by_env.items()):
        stats[f"train/env/{name}/reward_mean"] = float(np.mean(mine))
        stats[f"train/env/{name}/rollouts"] = len(mine)
    return stats


def _stage(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    stages = [stage for r in rollouts if isinstance(stage := r.meta.get(STAGE), int)]
    return {"curriculum_stage": max(stages) + 1} if stages else {}


def item_statistics(items: Sequence[SAWItem]) -> dict[str, Any]:
    """Row lengths, and the oldest and newest policy version among the tokens."""
    if not items:
        return {"items": 0, "tokens": 0}
    lengths = np.array([len(item.input_ids) for item in items])
    stats: dict[str, Any] = {
        "items": len(items),
        "tokens": int(lengths.sum()),
        "item_tokens_mean": float(lengths.mean()),
        "item_tokens_max": int(lengths.max()),
    }
    versions = [v for item in items if (v := item.attachments.versions) is not None]
    seen = np.concatenate(versions) if versions else np.empty(0, dtype=np.int64)
    seen = seen[seen != UNKNOWN_VERSION]
    if seen.size:
        stats |= {"version_max": int(seen.max()), "version_min": int(seen.min())}
    return stats


def _no_variance(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> float | None:
    """The share of groups in which every episode got the same reward, each role for itself; None
    if there are no groups."""
    by_group: dict[str, dict[str, list[float]]] = {}
    for r, reward in zip(rollouts, rewards, strict=True):
        if r.group_id is not None:
            by_group.setdefault(r.group_id, {}).setdefault(r.agent_id, []).append(reward)
    groups = [g.values() for g in by_group.values() if any(len(role) > 1 for role in g.values())]
    return _rate(all(len(set(v)) == 1 for v in group) for group in groups) if groups else None


def _rate(flags: Iterable[Any]) -> float:
    values = list(map(bool, flags))
    return sum(values) / len(values) if values else 0.0
