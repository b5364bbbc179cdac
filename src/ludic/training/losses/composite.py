"""Sums of losses, and the usual extra terms: entropy, and the KL to a reference.

With k1 = logp − logp_ref for a sampled token:
- k1 is an unbiased estimate of KL(π‖ref), but as a loss its expected gradient is zero, so here it
  only goes into the weights, before the loss (`KLInReward`).
- k2 = ½·k1²: its on-policy gradient is that of KL(π‖ref).
- k3 = e^(−k1) − 1 + k1, GRPO's: an unbiased estimate of KL(π‖ref) as a value, but its on-policy
  gradient is that of the other direction, KL(ref‖π).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from ludic.errors import BatchError, ConfigError
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.losses.policy_ratio import (
    MAX_LOG_RATIO,
    check_batch,
    missing_logprobs,
    policy_ratio,
    reduce,
)
from ludic.training.preprocess import chain, preprocess_of
from ludic.training.types import Loss, LossBatch, LossStats, Scope, Stat, TokenLogProbs

SCOPES: tuple[Scope, ...] = ("token", "turn", "rollout")


def widest(*scopes: Scope) -> Scope:
    """The scope that holds all of `scopes`; "token" for none."""
    return max(scopes, key=SCOPES.index, default="token")


class LossOfParts:
    """A loss made of others: it needs what they need, together."""

    def __init__(self, *parts: Loss) -> None:
        self.parts = parts
        self.preprocess = chain(*map(preprocess_of, parts))

    @property
    def needs_logits(self) -> bool:
        return any(loss.needs_logits for loss in self.parts)

    @property
    def scope(self) -> Scope:
        return widest(*(loss.scope for loss in self.parts))


class CompositeLoss(LossOfParts):
    """Σ coefficient · loss. Each term's share is logged as `loss_<class name>`.

    Statistics that several terms report under one name are taken from the first of them. All
    terms see the same weights: where one brings a baseline, it is taken off for all.

    >>> from ludic.training.algorithms.grpo import TokenClippedSurrogateLoss
    >>> loss = CompositeLoss((1.0, TokenClippedSurrogateLoss()), (0.01, EntropyBonus()))
    >>> loss.scope
    'token'
    """

    def __init__(self, *terms: tuple[float, Loss]) -> None:
        if not terms:
            raise ConfigError("CompositeLoss needs at least one (coefficient, loss)")
        super().__init__(*(loss for _, loss in terms))
        self.terms = terms

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The weighted sum of the terms' shares, and all their statistics."""
        total = policy.logprobs.new_zeros(())
        stats: dict[str, Stat] = {}
        for coefficient, loss in self.terms:
            share, found = loss.compute(policy, batch)
            total = total + coefficient * share
            stats = {f"loss_{type(loss).__name__}": Stat.sum(share), **found, **stats}
        return total, stats


@dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """Minus the policy's entropy: as a term of a `CompositeLoss` it keeps the policy from
    collapsing. A correction does not scale it, since entropy belongs to the state alone."""

    needs_logits: ClassVar[bool] = False
    scope: ClassVar[Scope] = "token"

    aggregation: Aggregation = token_mean

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The micro-batch's share of minus the aggregated entropy."""
        if policy.entropy is None:
            raise BatchError("EntropyBonus needs entropies, but the log-probs came without them")
        loss = -(policy.entropy * self.aggregation.coefficients(batch)).sum()
        return loss, {}


def with_entropy(loss: Loss, coefficient: float, aggregation: Aggregation) -> Loss:
    """`loss` minus `coefficient` times the entropy; `loss` itself when that is 0."""
    if not coefficient >= 0:
        raise ConfigError(f"entropy_coeff={coefficient!r}: must be >= 0")
    if coefficient == 0:
        return loss
    terms = loss.terms if isinstance(loss, CompositeLoss) else ((1.0, loss),)
    return CompositeLoss(*terms, (coefficient, EntropyBonus(aggregation=aggregation)))


Estimator = Literal["k2", "k3"]


def kl_estimate(
    logprobs: Float[Tensor, " tokens"], reference: Float[Tensor, " tokens"], estimator: Estimator
) -> Float[Tensor, " tokens"]:
    """k2 or k3 of each sampled token."""
    k1 = logprobs - reference
    if estimator == "k2":
        return 0.5 * k1.square()
    # Where the exponential would overflow, its tangent goes on in its place. Cut flat, it would
    # leave only +k1 to differentiate, which pushes a token that is too unlikely further down.
    held = (-k1).clamp(max=MAX_LOG_RATIO)
    return held.exp() * (1 + (-k1 - held)) - 1 + k1


@dataclass(frozen=True, kw_only=True)
class TokenKLLoss:
    """sg(ρ) · k2 or k3 against the reference's log-probs, to be minimised.

    ρ is there because the tokens were sampled by the behaviour policy; it is not differentiated,
    so that the gradients are those named above. `importance=False` leaves it out, as GRPO's paper
    does: right only on-policy.
    """

    needs_logits: ClassVar[bool] = False
    scope: ClassVar[Scope] = "token"

    estimator: Estimator = "k3"
    importance: bool = True
    aggregation: Aggregation = token_mean

    def __post_init__(self) -> None:
        if self.estimator not in ("k2", "k3"):
            raise ConfigError(
                f"TokenKLLoss.estimator={self.estimator!r}: must be 'k2' or 'k3'. k1 has "
                "no gradient as a loss: put it into the reward with KLInReward"
            )

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The micro-batch's share of the aggregated KL."""
        check_batch(policy, batch)
        if batch.reference_logprobs is None:
            raise missing_logprobs("reference")
        kl = kl_estimate(policy.logprobs, batch.reference_logprobs, self.estimator)
        term = kl
        if self.importance:
            term = policy_ratio(policy, batch, needed_by="TokenKLLoss").ratio.detach() * kl
        k1 = policy.logprobs - batch.reference_logprobs
        stats = {"kl_reference": Stat.mean(k1), f"kl_reference_{self.estimator}": Stat.mean(kl)}
        return reduce(-term, batch, self.aggregation), stats


def with_kl(loss: Loss, coefficient: float, aggregation: Aggregation) -> Loss:
    """`loss` plus `coefficient` times the KL to the reference; `loss` itself when that is 0."""
    if not coefficient >= 0:
        raise ConfigError(f"kl_coeff={coefficient!r}: must be >= 0")
    if coefficient == 0:
        return loss
    return CompositeLoss((1.0, loss), (coefficient, TokenKLLoss(aggregation=aggregation)))
