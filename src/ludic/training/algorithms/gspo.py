"""GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization").

Objective per sequence, with s = exp(mean_t (logp_t − logp_behaviour_t)), averaged over sequences:

    min(s·A, clip(s, 1 − 3e-4, 1 + 4e-4)·A),   A = (R − mean_group) / (std_group + 1e-4)

Departures: a sequence is a turn, or with `unit="rollout"` all that the agent wrote in a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.grpo import group_relative
from ludic.training.losses.aggregation import Aggregation, SequenceMean, Unit, sequence_mean
from ludic.training.losses.policy_ratio import Clip, Objective, PolicyLoss, PolicyRatio, check_clip

CLIP = (1 - 3e-4, 1 + 4e-4)


@dataclass(frozen=True, kw_only=True)
class SequenceClippedSurrogateLoss(PolicyLoss):
    """The clipped surrogate on the geometric mean of a sequence's ratios."""

    clip: Clip = CLIP
    unit: Unit = "turn"
    aggregation: Aggregation = sequence_mean

    def __post_init__(self) -> None:
        check_clip(self.clip)

    @property
    def scope(self) -> Unit:
        return self.unit

    def objective(self, ratio: PolicyRatio) -> Objective:
        s, a = ratio.geometric_mean(self.unit), ratio.weights
        return torch.minimum(s * a, held := s.clamp(*self.clip) * a), held < s * a


@remembered("gspo")
def make_gspo(
    group_size: int = 8,
    *,
    clip: Clip = CLIP,
    unit: Unit = "turn",
    kl_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Group-relative credit with one clipped ratio per sequence."""
    loss = SequenceClippedSurrogateLoss(clip=clip, unit=unit, aggregation=SequenceMean(unit))
    return group_relative("gspo", group_size, loss, kl_coeff=kl_coeff, entropy_coeff=entropy_coeff)
