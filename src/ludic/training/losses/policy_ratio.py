"""The ratio of the current policy to the one that sampled, and how losses use it.

A loss of this kind is a `PolicyLoss` with one method, its objective per token; this file checks the
inputs, aggregates, and gathers the statistics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ludic.errors import BatchError, ConfigError, NotTrainableError
from ludic.training.losses.aggregation import Aggregation, Unit, sequences
from ludic.training.types import LossBatch, LossStats, Scope, Stat, TokenLogProbs

MAX_LOG_RATIO = 20.0
"""Where log-ratios are cut before they are exponentiated: float32 overflows at 88."""


@dataclass(frozen=True, slots=True)
class PolicyRatio:
    """The current policy against the anchor (what sampled, or a correction's proximal policy).

    `log_ratio` and `ratio` carry the gradient; `weights` are the credit of each token.
    """

    logprobs: Float[Tensor, " tokens"]
    log_ratio: Float[Tensor, " tokens"]
    ratio: Float[Tensor, " tokens"]
    weights: Float[Tensor, " tokens"]
    batch: LossBatch

    def geometric_mean(
        self, unit: Unit, log_ratio: Float[Tensor, " tokens"] | None = None
    ) -> Float[Tensor, " tokens"]:
        """exp of the mean of log ρ (or of `log_ratio`, a clipped one) over each token's turn or
        rollout."""
        return exp_bounded(
            mean_over(self.log_ratio if log_ratio is None else log_ratio, self.batch, unit)
        )


Clip: TypeAlias = tuple[float, float]
"""The bounds of a ratio, such as (0.8, 1.2)."""

Objective: TypeAlias = tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"] | None]
"""A loss's term for each token, to be maximised, and which of them were clipped (None: no clip)."""


def policy_ratio(policy: TokenLogProbs, batch: LossBatch, *, needed_by: str) -> PolicyRatio:
    """The ratio block. Raises `NotTrainableError` when the sampler's log-probs are missing."""
    check_batch(policy, batch)
    if batch.behavior_logprobs is None:
        raise NotTrainableError(
            f"{needed_by} compares the policy with the one that sampled, but this batch has no "
            "behaviour log-probs: sample with ReturnSpec(logprobs=True), or use a loss without "
            "ratios, such as MaskedCausalLMCrossEntropyLoss"
        )
    log_ratio = policy.logprobs - batch.behavior_logprobs
    return PolicyRatio(policy.logprobs, log_ratio, exp_bounded(log_ratio), batch.weights, batch)


def check_batch(policy: TokenLogProbs, batch: LossBatch) -> None:
    """Raises `BatchError` for tensors that do not line up or weights that are not finite.

    Values are looked at only where that costs nothing: on an accelerator it would stall, and
    batches are checked when they are built.
    """
    if policy.logprobs.shape != batch.weights.shape:
        raise BatchError(
            f"{policy.logprobs.numel()} log-probs for {batch.weights.numel()} weights: both must "
            "have one entry per action token"
        )
    if batch.weights.device.type == "cpu" and not bool(torch.isfinite(batch.weights).all()):
        bad = int((~torch.isfinite(batch.weights)).nonzero()[0])
        raise BatchError(
            f"the weight of action token {bad} is {float(batch.weights[bad])}: weights must be "
            "finite; look at the rewards and the credit assigner"
        )


def missing_logprobs(whose: str) -> NotTrainableError:
    """The error for a batch that the reference or teacher of a loss has not scored."""
    return NotTrainableError(
        f"this loss needs the {whose}'s log-probs, which the batch lacks: name a {whose} in the "
        f"run, or wrap the source: ScoredBatchSource(source, [{whose.capitalize()}Scorer(...)])"
    )


def sequence_sum(
    values: Float[Tensor, " tokens"], ids: Int[Tensor, " tokens"], count: int
) -> Float[Tensor, " sequences"]:
    """The sum of `values` over the tokens of each sequence."""
    return values.new_zeros(count).index_add(0, ids, values)


def mean_over(
    values: Float[Tensor, " tokens"], batch: LossBatch, unit: Unit
) -> Float[Tensor, " tokens"]:
    """The mean over each token's sequence, written back to its tokens."""
    ids, lengths, _ = sequences(batch, unit)
    if ids.device.type == "cpu":
        here = torch.bincount(ids, minlength=lengths.numel())
        if not torch.equal(here, lengths.to(here.dtype)):
            raise BatchError(
                f"a {unit} is split over micro-batches, but this loss takes a mean over whole "
                f'{unit}s: its scope is "{unit}", and the packing must honour that'
            )
    return (sequence_sum(values, ids, lengths.numel()) / lengths.to(values.dtype))[ids]


def reduce(
    objective: Float[Tensor, " tokens"], batch: LossBatch, aggregation: Aggregation
) -> Float[Tensor, ""]:
    """The micro-batch's share of the loss: minus the aggregated objective, corrected where a
    correction is set."""
    if batch.importance is not None:
        objective = objective * batch.importance
    return -(objective * aggregation.coefficients(batch)).sum()


def ratio_stats(ratio: PolicyRatio, clipped: Bool[Tensor, " tokens"] | None) -> dict[str, Stat]:
    """What happened to the ratios, before any of them was clipped."""
    log_ratio, rho = ratio.log_ratio.detach(), ratio.ratio.detach()
    stats = {
        "ratio_mean": Stat.mean(rho),
        "ratio_max": Stat.max(rho),
        "ratio_min": Stat.min(rho),
        # Schulman's k3 of KL(behaviour || current): never negative, little variance.
        "kl_behavior": Stat.mean(rho - 1 - log_ratio),
    }
    if clipped is not None:
        stats["clip_fraction"] = Stat.mean(clipped.to(rho.dtype))
    return stats


@dataclass(frozen=True)
class PolicyLoss(ABC):
    """A loss whose objective is one number per token, made of the ratio and the weight.

    Subclasses are frozen dataclasses that set `aggregation` and write `objective`.
    """

    needs_logits: ClassVar[bool] = False

    aggregation: Aggregation

    @property
    def scope(self) -> Scope:
        """Which tokens must be seen together; "token" unless a subclass says otherwise."""
        return "token"

    @abstractmethod
    def objective(self, ratio: PolicyRatio) -> Objective:
        """What is to be maximised, per token, and which tokens were clipped."""

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The micro-batch's share of the loss, and the statistics of its ratios."""
        ratio = policy_ratio(policy, batch, needed_by=type(self).__name__)
        objective, clipped = self.objective(ratio)
        return reduce(objective, batch, self.aggregation), ratio_stats(ratio, clipped)


def exp_bounded(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """exp, with the exponent held where float32 neither overflows nor turns 0 times it to NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_bounds(low: float | None, high: float) -> None:
    """Raises `ConfigError` unless 0 <= low <= high and high > 0; no low means none."""
    if not (0 <= (low or 0.0) <= high and high > 0):
        raise ConfigError(f"bounds of a ratio must be 0 <= low <= high, high > 0: {low}, {high}")


def check_clip(clip: Clip) -> None:
    """Raises `ConfigError` unless `clip` is (low, high) with 0 <= low <= 1 <= high."""
    low, high = clip
    if not 0 <= low <= 1 <= high:
        raise ConfigError(
            f"clip={clip}: must be the bounds of the ratio, 0 <= low <= 1 <= high, e.g. (0.8, 1.2)"
        )
