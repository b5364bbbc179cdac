"""Slow references of the credit assigners: plain loops over lists of rewards.

A rollout is its list of turn rewards; a group is a list of rollouts. The answers are weights in
the same shape.
"""

from __future__ import annotations

import math


def monte_carlo(rewards: list[float], gamma: float) -> list[float]:
    """G_t as the double sum of the definition."""
    weights = []
    for start in range(len(rewards)):
        weights.append(sum(gamma ** (k - start) * rewards[k] for k in range(start, len(rewards))))
    return weights


def group_advantages(returns: list[float], normalize: bool, eps: float = 1e-4) -> list[float]:
    """R − mean; ÷ (sample std + eps)."""
    n = len(returns)
    mean = sum(returns) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in returns) / (n - 1))
    return [(r - mean) / (std + eps) if normalize else r - mean for r in returns]


def hybrid_advantages(
    groups: list[list[float]], drop_flat: bool, eps: float = 1e-4
) -> list[list[float]]:
    """Group-centred returns over the batch's std of them; flat groups left out of the std."""
    centred = []
    for returns in groups:
        mean = sum(returns) / len(returns)
        centred.append([r - mean for r in returns])
    flat = [len(set(returns)) == 1 for returns in groups]
    pool = [
        c
        for values, is_flat in zip(centred, flat, strict=True)
        if not (drop_flat and is_flat)
        for c in values
    ]
    std = 0.0
    if len(pool) > 1:
        mean = sum(pool) / len(pool)
        std = math.sqrt(sum((c - mean) ** 2 for c in pool) / (len(pool) - 1))
    return [[c / (std + eps) for c in values] for values in centred]


def leave_one_out(returns: list[float]) -> list[float]:
    """RLOO: R minus the mean of the others."""
    total, n = sum(returns), len(returns)
    return [r - (total - r) / (n - 1) for r in returns]
