"""What the GRPO family has in common: credit relative to a group, and optional terms."""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment.returns import GroupNormalizedReturn
from ludic.training.losses.composite import with_entropy, with_kl
from ludic.training.losses.policy_ratio import PolicyLoss


def group_relative(
    name: str,
    group_size: int,
    loss: PolicyLoss,
    *,
    normalize_adv: bool = True,
    kl_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """`loss` on group-relative credit, plus `kl_coeff` times k3 and minus `entropy_coeff`
    times the entropy, both aggregated as the loss is."""
    credit = GroupNormalizedReturn(group_size, normalize_adv=normalize_adv)
    whole = with_kl(loss, kl_coeff, loss.aggregation)
    return RLAlgorithm(name, credit, with_entropy(whole, entropy_coeff, loss.aggregation))
