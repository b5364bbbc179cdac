"""GRPO (Shao et al. 2024, "DeepSeekMath"), and what its family has in common.

Objective per token, to be maximised, with ρ = exp(logp − logp_behaviour):

    min(ρ·A, clip(ρ, 0.8, 1.2)·A),   A = (R − mean_group) / (std_group + 1e-4)

as a mean within each sequence, then over sequences. Departures from the paper: a sequence is a turn
(`aggregation=SequenceMean("rollout")`: a rollout); KL is off unless `kl_coeff` is set (with sg(ρ)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.credit_assignment.returns import GroupNormalizedReturn
from ludic.training.losses.aggregation import Aggregation, sequence_mean
from ludic.training.losses.composite import with_entropy, with_kl
from ludic.training.losses.policy_ratio import Clip, Objective, PolicyLoss, PolicyRatio, check_clip


def group_relative(
    name: str,
    group_size: int,
    loss: PolicyLoss,
    normalize_adv: bool = True,
    kl_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """`loss` on group-relative credit; KL (k3) and entropy are aggregated as the loss is."""
    credit = GroupNormalizedReturn(group_size, normalize_adv=normalize_adv)
    whole = with_kl(loss, kl_coeff, loss.aggregation)
    return RLAlgorithm(name, credit, with_entropy(whole, entropy_coeff, loss.aggregation))


@dataclass(frozen=True, kw_only=True)
class TokenClippedSurrogateLoss(PolicyLoss):
    """PPO's clipped surrogate on each token's own ratio; `clip` bounds the ratio."""

    clip: Clip = (0.8, 1.2)
    aggregation: Aggregation = sequence_mean

    def __post_init__(self) -> None:
        check_clip(self.clip)

    def objective(self, ratio: PolicyRatio) -> Objective:
        free = ratio.ratio * ratio.weights
        held = ratio.ratio.clamp(*self.clip) * ratio.weights
        return torch.minimum(free, held), held < free


@remembered("grpo")
def make_grpo(
    group_size: int = 8,
    *,
    clip: Clip = (0.8, 1.2),
    aggregation: Aggregation = sequence_mean,
    normalize_adv: bool = True,
    kl_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Group-relative credit with the clipped surrogate on tokens."""
    loss = TokenClippedSurrogateLoss(clip=clip, aggregation=aggregation)
    return group_relative("grpo", group_size, loss, normalize_adv, kl_coeff, entropy_coeff)
