"""Reward functions, and when two answers are the same."""

from ludic.rewards.functions import (
    Attempt,
    RewardFn,
    RewardSpec,
    RewardSum,
    Score,
    exact_reward,
    format_reward,
    length_reward,
    make_rewards,
    numeric_reward,
    symbolic_reward,
)

__all__ = [
    "Attempt",
    "RewardFn",
    "RewardSpec",
    "RewardSum",
    "Score",
    "exact_reward",
    "format_reward",
    "length_reward",
    "make_rewards",
    "numeric_reward",
    "symbolic_reward",
]
