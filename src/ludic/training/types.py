"""The contracts of the training half: credit, losses, batch sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ludic.saw.items import BatchCounts, SAWBatch
from ludic.types import Rollout, RolloutStepKey


class CreditAssigner(Protocol):
    """Gives every turn of every rollout its weight. Pure: the same rollouts, the same weights.

    One with memory across batches also has `state_dict` and `load_state_dict`. One that forgets as
    the policy moves has `watches_drift`, and `observe_drift(kl)` tells it of every update.
    """

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float]: ...


PreprocessFn = Callable[[SAWBatch], SAWBatch]


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """What the current policy says of the micro-batch's action tokens, in float32.

    `logprobs` carries the gradient, at the temperature and over the kept ids that were sampled
    with. `logits` is there only for a loss with `needs_logits`.
    """

    logprobs: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"] | None = None
    logits: Float[Tensor, "tokens vocab"] | None = None


@dataclass(frozen=True, slots=True)
class LossBatch:
    """The facts about a micro-batch's action tokens that a loss may use, all flat.

    `turn_ids`, `rollout_ids` and `group_ids` number the turns, rollouts and groups of this
    micro-batch from 0; `*_lengths` are their action tokens in the whole macro-batch. `counts` are
    those of the macro-batch over all ranks, so that the micro-batches' losses add up to the
    macro-batch's whatever the split. `importance` is a correction's factor for each token, which
    `ludic.training.losses.corrections` fills in; a loss that goes through `reduce` carries it.
    """

    weights: Float[Tensor, " tokens"]
    turn_ids: Int[Tensor, " tokens"]
    rollout_ids: Int[Tensor, " tokens"]
    group_ids: Int[Tensor, " tokens"]
    turn_lengths: Int[Tensor, " turns"]
    rollout_lengths: Int[Tensor, " rollouts"]
    group_lengths: Int[Tensor, " groups"]
    counts: BatchCounts
    behavior_logprobs: Float[Tensor, " tokens"] | None = None
    proximal_logprobs: Float[Tensor, " tokens"] | None = None
    reference_logprobs: Float[Tensor, " tokens"] | None = None
    teacher_logprobs: Float[Tensor, " tokens"] | None = None
    versions: Int[Tensor, " tokens"] | None = None
    importance: Float[Tensor, " tokens"] | None = None


@dataclass(frozen=True, slots=True)
class Stat:
    """One statistic of a micro-batch, before it is reduced over micro-batches and ranks.

    `mean` is total over weight; `sum`, `max` and `min` ignore the weight.
    """

    total: Tensor
    weight: Tensor
    how: Literal["mean", "sum", "max", "min"] = "mean"

    @staticmethod
    def mean(values: Float[Tensor, " n"]) -> Stat:
        """The mean of `values`, weighted by their number."""
        values = values.detach()
        return Stat(values.sum(), torch.as_tensor(float(values.numel()), device=values.device))

    @staticmethod
    def sum(value: Float[Tensor, ""]) -> Stat:
        """A micro-batch's share of a quantity that adds up over micro-batches."""
        value = value.detach()
        return Stat(value, torch.ones_like(value), "sum")

    @staticmethod
    def max(values: Float[Tensor, " n"]) -> Stat:
        """The largest of `values`; of none, minus infinity, which any other value replaces."""
        values = values.detach()
        top = values.max() if values.numel() else values.new_tensor(float("-inf"))
        return Stat(top, torch.ones_like(top), "max")

    @staticmethod
    def min(values: Float[Tensor, " n"]) -> Stat:
        """The smallest of `values`; of none, infinity, which any other value replaces."""
        values = values.detach()
        low = values.min() if values.numel() else values.new_tensor(float("inf"))
        return Stat(low, torch.ones_like(low), "min")


LossStats = Mapping[str, Stat]
Scope = Literal["token", "turn", "rollout"]


class Loss(Protocol):
    """To be minimised. `scope` says which tokens must be seen together: a loss with ratios over a
    whole turn says "turn", and the turn's tokens then share a micro-batch. Both properties may
    be plain class attributes."""

    @property
    def needs_logits(self) -> bool: ...

    @property
    def scope(self) -> Scope: ...

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The micro-batch's share of the macro-batch's loss (the shares are added), and stats."""
        ...


@runtime_checkable
class BatchSource(Protocol):
    """Where macro-batches come from. One that can be resumed has `state_dict` and
    `load_state_dict`."""

    async def next_batch(self) -> SAWBatch: ...


@runtime_checkable
class Stateful(Protocol):
    """Something whose state is saved with a checkpoint; the state is JSON."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
