"""REINFORCE with the batch's mean as the baseline.

Objective per token: sg(ρ)·(A − b)·logp, where A is the discounted return from the token's turn on
and b the mean of A over the turns of the macro-batch.

Defaults: γ = 1, no cap, token_mean. b is taken when the macro-batch is made (`subtract_mean`), so
it does not depend on how the batch is split. Each sample is part of its own baseline: with
Constant aggregation and n independent rollouts of one turn this is (n − 1)/n of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ludic.saw.items import SAWBatch
from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.reinforce import ReinforceLoss, monte_carlo
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.preprocess import subtract_mean


@dataclass(frozen=True, kw_only=True)
class ReinforceBaselineLoss(ReinforceLoss):
    """`ReinforceLoss` on centred weights; an `RLAlgorithm` takes over its `preprocess`."""

    def preprocess(self, batch: SAWBatch) -> SAWBatch:
        """The batch with the mean weight of its turns taken off every weight."""
        return subtract_mean(batch)


@remembered("reinforce_baseline")
def make_reinforce_baseline(
    gamma: float = 1.0,
    *,
    cap: float = math.inf,
    aggregation: Aggregation = token_mean,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Monte Carlo returns minus their mean over the batch, with the policy gradient."""
    loss = ReinforceBaselineLoss(cap=cap, aggregation=aggregation)
    return monte_carlo("reinforce_baseline", gamma, loss, entropy_coeff)
