"""Corrections for the mismatch of sampler and trainer, which compose with any loss.

There are three policies: behaviour (the sampler's), proximal (the trainer's weights at the start of
this update) and current. A plain loss takes its ratio against behaviour. A `CorrectedLoss` takes it
against proximal, and multiplies every token's term by a factor made of

    r = exp(logp_proximal − logp_behaviour)

per token, or per turn or rollout as a product or a geometric mean. Masked tokens still count in the
normalisers. Without recorded proximal log-probs the current ones are used, which is exact for the
first step on a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ludic.errors import ConfigError, NotTrainableError, nearest
from ludic.training.losses.aggregation import sequences
from ludic.training.losses.composite import SCOPES, LossOfParts, widest
from ludic.training.losses.policy_ratio import check_bounds, exp_bounded, mean_over
from ludic.training.types import Loss, LossBatch, LossStats, Scope, Stat, TokenLogProbs, parts_of

Mean = Literal["product", "geometric"]


class Correction(Protocol):
    """Gives each token a factor. `level` says which tokens it looks at together."""

    @property
    def level(self) -> Scope: ...

    def factors(
        self, log_ratio: Float[Tensor, " tokens"], batch: LossBatch
    ) -> tuple[Float[Tensor, " tokens"], LossStats]:
        """The factors, and statistics from before anything was cut."""
        ...


def level_ratio(
    log_ratio: Float[Tensor, " tokens"], batch: LossBatch, level: Scope, mean: Mean
) -> Float[Tensor, " tokens"]:
    """Each token's ratio at the level: its own, or its turn's or rollout's."""
    if level != "token":
        log_ratio = mean_over(log_ratio, batch, level)
        if mean == "product":
            ids, lengths, _ = sequences(batch, level)
            log_ratio = log_ratio * lengths[ids].to(log_ratio.dtype)
    return exp_bounded(log_ratio)


@dataclass(frozen=True, slots=True)
class TruncatedImportance:
    """min(r, `upper`), and at least `lower` where one is set: every token keeps a gradient."""

    upper: float = 2.0
    lower: float | None = None
    level: Scope = "token"
    mean: Mean = "product"

    def __post_init__(self) -> None:
        _check(self)

    def factors(
        self, log_ratio: Float[Tensor, " tokens"], batch: LossBatch
    ) -> tuple[Float[Tensor, " tokens"], LossStats]:
        ratio = level_ratio(log_ratio, batch, self.level, self.mean)
        held = ratio.clamp(min=self.lower, max=self.upper)
        return held, _stats("truncated", self.level, ratio, held != ratio)


@dataclass(frozen=True, slots=True)
class MaskedImportance:
    """r where `lower` ≤ r ≤ `upper`, else 0: what the trainer cannot account for is left out.

    With `keep_ratio=False` the factor is 1 inside the bounds: a pure rejection, to be combined
    with a `TruncatedImportance`.
    """

    lower: float = 0.5
    upper: float = 2.0
    level: Scope = "token"
    mean: Mean = "product"
    keep_ratio: bool = True

    def __post_init__(self) -> None:
        _check(self)

    def factors(
        self, log_ratio: Float[Tensor, " tokens"], batch: LossBatch
    ) -> tuple[Float[Tensor, " tokens"], LossStats]:
        ratio = level_ratio(log_ratio, batch, self.level, self.mean)
        inside = (ratio >= self.lower) & (ratio <= self.upper)
        value = ratio if self.keep_ratio else torch.ones_like(ratio)
        factors = torch.where(inside, value, torch.zeros_like(ratio))
        return factors, _stats("masked", self.level, ratio, ~inside)


def _check(correction: TruncatedImportance | MaskedImportance) -> None:
    check_bounds(correction.lower, correction.upper)
    for name, choices in (("level", SCOPES), ("mean", get_args(Mean))):
        value = getattr(correction, name)
        if value not in choices:
            given = f"{type(correction).__name__}({name}={value!r})"
            raise ConfigError(f"{given}: no such {name}{nearest(str(value), choices)}")


def _stats(
    what: str, level: Scope, ratio: Float[Tensor, " tokens"], hit: Bool[Tensor, " tokens"]
) -> LossStats:
    return {
        f"correction_{level}_ratio_mean": Stat.mean(ratio),
        f"correction_{level}_ratio_max": Stat.max(ratio),
        f"correction_{level}_ratio_min": Stat.min(ratio),
        f"correction_{level}_{what}_fraction": Stat.mean(hit.to(ratio.dtype)),
    }


class CorrectedLoss(LossOfParts):
    """A loss against the proximal policy, its tokens multiplied by all the corrections' factors.

    >>> from ludic.training.algorithms.grpo import TokenClippedSurrogateLoss
    >>> geometric = MaskedImportance(0.99, 1.01, level="turn", mean="geometric", keep_ratio=False)
    >>> CorrectedLoss(TokenClippedSurrogateLoss(), TruncatedImportance(2.0), geometric).scope
    'turn'
    """

    def __init__(self, loss: Loss, *corrections: Correction) -> None:
        if not corrections:
            raise ConfigError(
                "CorrectedLoss needs at least one correction, such as TruncatedImportance()"
            )
        if any(isinstance(part, CorrectedLoss) for part in parts_of(loss)):
            raise ConfigError(
                "a CorrectedLoss inside another would correct nothing, since its behaviour policy "
                "is the outer one's proximal: give all the corrections to one CorrectedLoss"
            )
        super().__init__(loss)
        self.loss, self.corrections = loss, corrections

    @property
    def scope(self) -> Scope:
        return widest(super().scope, *(c.level for c in self.corrections))

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The corrected loss's share; the `correction_*` statistics are from before any cut."""
        if batch.behavior_logprobs is None:
            raise NotTrainableError(
                "a correction compares with the policy that sampled, but this batch has no "
                "behaviour log-probs: sample with ReturnSpec(logprobs=True)"
            )
        proximal = batch.proximal_logprobs
        if proximal is None:
            proximal = policy.logprobs.detach()
        log_ratio = (proximal - batch.behavior_logprobs).detach()
        stats: dict[str, Stat] = {}
        importance = torch.ones_like(log_ratio) if batch.importance is None else batch.importance
        for correction in self.corrections:
            factors, found = correction.factors(log_ratio, batch)
            importance = importance * factors
            stats.update(found)
        inner = replace(batch, behavior_logprobs=proximal, importance=importance)
        loss, found = self.loss.compute(policy, inner)
        return loss, {**found, **stats}
