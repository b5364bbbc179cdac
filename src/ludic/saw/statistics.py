"""The statistics in a batch's `meta` about the rollouts it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ludic.saw.building import UNKNOWN_VERSION
from ludic.saw.items import SAWItem
from ludic.types import AgentStep, FinishReason, Rollout


def rollout_statistics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Rewards, lengths and endings over the rollouts that did not fail, and the rate of those
    that did, as numbers for the log."""
    if not rollouts:
        return {"rollouts_sampled": 0}
    episodes = {r.episode_id or r.id: r.error is not None for r in rollouts}
    stats: dict[str, Any] = {
        "rollouts_sampled": len(rollouts),
        "episodes": len(episodes),
        "failed_episodes": sum(episodes.values()),
        "failed_rate": sum(episodes.values()) / len(episodes),
    }
    done = [r for r in rollouts if r.error is None]
    if not done:
        return stats
    rewards = np.array([r.total_reward for r in done])
    calls = [step for r in done for step in r.agent_steps]
    env_steps = [step for r in done for step in r.env_steps if step.agent_steps]
    lengths = np.array([r.num_tokens for r in done])
    stats |= {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "turns_mean": len({(r.id, s.turn_index) for r in done for s in r.agent_steps}) / len(done),
        "calls_mean": len(calls) / len(done),
        "completion_tokens": int(lengths.sum()),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_max": int(lengths.max()),
        "prompt_tokens_max": max((_prompt_length(call) for call in calls), default=0),
        "terminated_rate": float(np.mean([r.terminated for r in done])),
        "truncated_rate": float(np.mean([r.truncated for r in done])),
        "parse_error_rate": _rate(s.info.get("parse_error", False) for s in env_steps),
        "cut_completion_rate": _rate(c.finish_reason is FinishReason.LENGTH for c in calls),
        "forks": dict(Counter(str(c.fork.reason) for c in calls if c.fork is not None)),
    }
    stats |= {f"reward_{name}_mean": mean for name, mean in _component_means(done).items()}
    return stats


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
    known = np.concatenate(versions) if versions else np.empty(0, dtype=np.int64)
    known = known[known != UNKNOWN_VERSION]
    if known.size:
        stats |= {"version_max": int(known.max()), "version_min": int(known.min())}
    return stats


def _component_means(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """The mean per rollout of every reward component."""
    totals: Counter[str] = Counter()
    for rollout in rollouts:
        for step in rollout.env_steps:
            for name, value in step.reward_components.items():
                totals[name] += value  # type: ignore[assignment]
    return {name: float(total) / len(rollouts) for name, total in sorted(totals.items())}


def _prompt_length(call: AgentStep) -> int:
    return len(call.trace.prompt_token_ids) if call.trace else 0


def _rate(flags: Iterable[Any]) -> float:
    values = [bool(flag) for flag in flags]
    return sum(values) / len(values) if values else 0.0
