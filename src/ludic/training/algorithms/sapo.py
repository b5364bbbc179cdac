"""SAPO (Gao et al. 2025, "Soft Adaptive Policy Optimization").

A soft gate instead of the clip. Objective per token:

    (4/τ)·σ(τ·(ρ − 1))·A,   τ = 1.0 for A > 0, 1.05 for A ≤ 0

whose derivative in ρ is 4·σ·(1 − σ)·A: A itself at ρ = 1, and fading on both sides, faster where
the token is pushed down. A = (R − mean_group) / (std_group + 1e-4), sequence_mean.

Departures from the paper: a sequence is a turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ludic.errors import ConfigError
from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.grpo import group_relative
from ludic.training.losses.aggregation import Aggregation, sequence_mean
from ludic.training.losses.policy_ratio import Objective, PolicyLoss, PolicyRatio


@dataclass(frozen=True, kw_only=True)
class SAPOLoss(PolicyLoss):
    """The sigmoid-gated surrogate."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    aggregation: Aggregation = sequence_mean

    def __post_init__(self) -> None:
        if not (self.tau_pos > 0 and self.tau_neg > 0):
            raise ConfigError(f"SAPOLoss: temperatures > 0, not {self.tau_pos}, {self.tau_neg}")

    def objective(self, ratio: PolicyRatio) -> Objective:
        positive = (ratio.weights > 0).to(ratio.weights.dtype)
        tau = self.tau_neg + (self.tau_pos - self.tau_neg) * positive
        return 4 / tau * torch.sigmoid(tau * (ratio.ratio - 1)) * ratio.weights, None


@remembered("sapo")
def make_sapo(
    group_size: int = 8,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    kl_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Group-relative credit with a soft gate on the ratio."""
    loss = SAPOLoss(tau_pos=tau_pos, tau_neg=tau_neg)
    return group_relative("sapo", group_size, loss, kl_coeff=kl_coeff, entropy_coeff=entropy_coeff)
