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

    One with memory across batches also has `state_dict` and `load_state_dict`.
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
    macro-batch's whatever the split.
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


LossStats = Mapping[str, Stat]
Scope = Literal["token", "turn", "rollout"]


class Loss(Protocol):
    """To be minimised. `scope` says which tokens must be seen together: a loss with ratios over a
    whole turn says "turn", and the turn's tokens then share a micro-batch."""

    needs_logits: bool
    needs_entropy: bool
    scope: Scope

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
