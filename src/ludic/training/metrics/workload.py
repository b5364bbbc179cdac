"""How much an update computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """What computing rows together takes: `size` in the budget's tokens, `cost` in time; the tokens
    that are computed, and the pairs of tokens that meet in attention, twice."""

    size: int = 0
    cost: float = 0.0
    tokens: int = 0
    pairs: int = 0

    def __add__(self, other: Workload) -> Workload:
        return Workload(
            self.size + other.size,
            self.cost + other.cost,
            self.tokens + other.tokens,
            self.pairs + other.pairs,
        )
