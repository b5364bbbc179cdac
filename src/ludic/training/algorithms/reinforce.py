"""REINFORCE (Williams 1992), with importance sampling.

Objective per token: sg(ρ)·A·logp, ρ = exp(logp − logp_behaviour), capped where `cap` is set.
A is the discounted return from the token's turn on: Σ_k γ^k r, counted in turns.

Defaults: γ = 1, no cap, token_mean. Departures from the paper: the token mean is biased by
length (`aggregation=Constant(L)` is not), and ρ makes stale data usable; the paper is on-policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.credit_assignment.returns import MonteCarloReturn
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.losses.composite import with_entropy
from ludic.training.losses.policy_ratio import Objective, PolicyLoss, PolicyRatio, check_bounds


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """sg(ρ)·A·logp, with ρ held under `cap`."""

    cap: float = math.inf
    aggregation: Aggregation = token_mean

    def __post_init__(self) -> None:
        check_bounds(None, self.cap)

    def objective(self, ratio: PolicyRatio) -> Objective:
        rho = ratio.ratio.detach()
        held = rho.clamp(max=self.cap)
        return held * ratio.weights * ratio.logprobs, held < rho


@remembered("reinforce")
def make_reinforce(
    gamma: float = 1.0,
    *,
    cap: float = math.inf,
    aggregation: Aggregation = token_mean,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Monte Carlo returns with the policy gradient."""
    loss = ReinforceLoss(cap=cap, aggregation=aggregation)
    return monte_carlo("reinforce", gamma, loss, entropy_coeff)


def monte_carlo(name: str, gamma: float, loss: PolicyLoss, entropy_coeff: float) -> RLAlgorithm:
    """Monte Carlo returns with `loss`, minus `entropy_coeff` times the entropy."""
    whole = with_entropy(loss, entropy_coeff, loss.aggregation)
    return RLAlgorithm(name, MonteCarloReturn(gamma), whole)
