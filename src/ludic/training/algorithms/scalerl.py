"""ScaleRL (Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute for LLMs").

CISPO's objective, sg(min(ρ, cap))·A·logp, with

    A = (R − mean_group) / (std over the batch of the group-centred returns + 1e-4)

after groups without variance are dropped, aggregated as a token mean within each group, then over
groups. Defaults: group size 8, cap 5, `filter_zvp=True`.

Departures from the paper: what it does outside the loss (the curriculum that retires solved
tasks, forced ends of long answers, the asynchronous pipeline) is left to those parts.
"""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.cispo import CISPOLoss
from ludic.training.credit_assignment.returns import HybridNormalizedReturn
from ludic.training.losses.aggregation import Aggregation, group_mean
from ludic.training.losses.composite import with_entropy
from ludic.training.preprocess import drop_zero_variance_groups


@remembered("scalerl")
def make_scalerl(
    group_size: int = 8,
    filter_zvp: bool = True,
    *,
    cap: float = 5.0,
    floor: float | None = None,
    aggregation: Aggregation = group_mean,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Hybrid-normalised credit with capped importance weights, every group weighing the same."""
    loss = CISPOLoss(cap=cap, floor=floor, aggregation=aggregation)
    return RLAlgorithm(
        "scalerl",
        HybridNormalizedReturn(group_size, filter_zvp=filter_zvp),
        with_entropy(loss, entropy_coeff, aggregation),
        preprocess=drop_zero_variance_groups if filter_zvp else None,
    )
