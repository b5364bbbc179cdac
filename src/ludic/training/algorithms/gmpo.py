"""GMPO (Zhao et al. 2025, "Geometric-Mean Policy Optimization").

The geometric mean of a sequence's ratios, each clipped on the side where its weight would gain:

    A > 0: A·exp(mean_t min(log ρ_t, 0.4)),   A < 0: A·exp(mean_t max(log ρ_t, −0.4))

A = (R − mean_group) / (std_group + 1e-4), averaged over sequences. Departures from the paper: a
sequence is a turn, or with `unit="rollout"` all that the agent wrote, clipped by each token's A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.grpo import group_relative
from ludic.training.losses.aggregation import Aggregation, SequenceMean, Unit, sequence_mean
from ludic.training.losses.policy_ratio import Objective, PolicyLoss, PolicyRatio, check_bounds


@dataclass(frozen=True, kw_only=True)
class GMPOLoss(PolicyLoss):
    """The geometric-mean surrogate; `clip` bounds the logarithm of each ratio."""

    clip: float = 0.4
    unit: Unit = "turn"
    aggregation: Aggregation = sequence_mean

    def __post_init__(self) -> None:
        check_bounds(0.0, self.clip)

    @property
    def scope(self) -> Unit:
        return self.unit

    def objective(self, ratio: PolicyRatio) -> Objective:
        log_ratio, up = ratio.log_ratio, ratio.weights > 0
        held = torch.where(up, log_ratio.clamp(max=self.clip), log_ratio.clamp(min=-self.clip))
        return ratio.geometric_mean(self.unit, held) * ratio.weights, held != log_ratio


@remembered("gmpo")
def make_gmpo(
    group_size: int = 8,
    *,
    clip: float = 0.4,
    unit: Unit = "turn",
    kl_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Group-relative credit with the geometric mean of clipped ratios."""
    loss = GMPOLoss(clip=clip, unit=unit, aggregation=SequenceMean(unit))
    return group_relative("gmpo", group_size, loss, kl_coeff=kl_coeff, entropy_coeff=entropy_coeff)
