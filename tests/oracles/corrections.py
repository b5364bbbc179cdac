"""Slow references of the importance corrections: plain numbers, one token after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.oracles.tokens import Token


def ratio(tokens: Sequence[Token], i: int, level: str, mean: str) -> float:
    """proximal / behaviour of the token, or of its turn or rollout."""
    if level == "token":
        return math.exp(tokens[i].proximal) / math.exp(tokens[i].behavior)
    mine = [t for t in tokens if getattr(t, level) == getattr(tokens[i], level)]
    product = 1.0
    for t in mine:
        product *= math.exp(t.proximal) / math.exp(t.behavior)
    return product if mean == "product" else product ** (1 / len(mine))


def truncated(r: float, upper: float) -> float:
    """min(r, upper)."""
    return min(r, upper)


def masked(r: float, lower: float, upper: float, keep_ratio: bool) -> float:
    """r, or 1, inside the bounds; 0 outside."""
    if r < lower or r > upper:
        return 0.0
    return r if keep_ratio else 1.0
