"""Losses added up, and the entropy bonus that is usually one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ludic.errors import BatchError, ConfigError
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.preprocess import chain, preprocess_of
from ludic.training.types import Loss, LossBatch, LossStats, Scope, Stat, TokenLogProbs

SCOPES: tuple[Scope, ...] = ("token", "turn", "rollout")


def widest(*scopes: Scope) -> Scope:
    """The scope that holds all of `scopes`; "token" for none."""
    return max(scopes, key=SCOPES.index, default="token")


class CompositeLoss:
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
        self.terms = terms
        self.preprocess = chain(*(preprocess_of(loss) for _, loss in terms))

    @property
    def parts(self) -> tuple[Loss, ...]:
        return tuple(loss for _, loss in self.terms)

    @property
    def needs_logits(self) -> bool:
        return any(loss.needs_logits for _, loss in self.terms)

    @property
    def scope(self) -> Scope:
        return widest(*(loss.scope for _, loss in self.terms))

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
