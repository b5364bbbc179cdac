"""CISPO (MiniMax 2025, "MiniMax-M1").

Objective per token: sg(min(ρ, cap))·A·logp, a REINFORCE step whose importance weight is capped.
No token loses its gradient, not even rare ones whose ratio ran away; they are only held.

    A = (R − mean_group) / (std_group + 1e-4), token_mean, cap 5 (a ratio), no floor, no KL

Departures from the paper: its cap is 1 + ε_high, here the ratio itself; KL, as `kl_coeff`, is new.
"""

from __future__ import annotations

from dataclasses import dataclass

from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.grpo import group_relative
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.losses.policy_ratio import Objective, PolicyLoss, PolicyRatio, check_bounds


@dataclass(frozen=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """sg(min(ρ, cap))·A·logp, with an optional floor under ρ."""

    cap: float = 5.0
    floor: float | None = None
    aggregation: Aggregation = token_mean

    def __post_init__(self) -> None:
        check_bounds(self.floor, self.cap)

    def objective(self, ratio: PolicyRatio) -> Objective:
        rho = ratio.ratio.detach()
        held = rho.clamp(min=self.floor, max=self.cap)
        return held * ratio.weights * ratio.logprobs, held != rho


@remembered("cispo")
def make_cispo(
    group_size: int = 8,
    kl_coeff: float = 0.0,
    *,
    cap: float = 5.0,
    floor: float | None = None,
    aggregation: Aggregation = token_mean,
    normalize_adv: bool = True,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Group-relative credit with capped importance weights."""
    loss = CISPOLoss(cap=cap, floor=floor, aggregation=aggregation)
    return group_relative("cispo", group_size, loss, normalize_adv, kl_coeff, entropy_coeff)
