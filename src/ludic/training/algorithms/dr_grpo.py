"""Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training").

GRPO's objective with A = R − mean_group (no division by the group's std), summed over tokens and
divided by L · number of rollouts, where L is a constant: neither the length of an answer nor the
difficulty of its task scales the gradient. On-policy it is (G − 1)/G of the policy gradient, / L.

Defaults: clip (0.8, 1.2); L = `max_completion_tokens` = 1024, which only scales the learning rate.
The paper takes the longest answer allowed for L: set it so to compare learning rates with it.
"""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.grpo import TokenClippedSurrogateLoss, group_relative
from ludic.training.losses.aggregation import Constant


@remembered("dr_grpo")
def make_dr_grpo(
    group_size: int = 8,
    *,
    clip: tuple[float, float] = (0.8, 1.2),
    max_completion_tokens: float = 1024,
    kl_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """GRPO without the division by the group's std or by lengths."""
    loss = TokenClippedSurrogateLoss(clip=clip, aggregation=Constant(max_completion_tokens))
    return group_relative("dr_grpo", group_size, loss, False, kl_coeff, entropy_coeff)
