"""The contract of losses, and of evaluations during training.

Other contracts: credit in `ludic.saw.building`, algorithms in `ludic.training.algorithm`, batch
sources in `ludic.training.batching.source`, publishers in `ludic.distributed.interfaces`. Those
that a trainer takes are re-exported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ludic.plumbing.lazy import resolve
from ludic.saw.items import BatchCounts


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """The current policy's log-probs of the micro-batch's action tokens, in float32.

    `logprobs` has the gradient, and uses the temperature and kept ids of the sampling. `logits` is
    set only for a loss with `needs_logits`.
    """

    logprobs: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"] | None = None
    logits: Float[Tensor, "tokens vocab"] | None = None


@dataclass(frozen=True, slots=True)
class LossBatch:
    """What a loss may use of a micro-batch's action tokens, in flat tensors.

    `turn_ids`, `rollout_ids` and `group_ids` number the turns, rollouts and groups of this
    micro-batch from 0; `*_lengths` are their numbers of action tokens in the whole macro-batch.
    `counts` are those of the macro-batch over all ranks, so that the losses of micro-batches add up
    to that of the macro-batch, whatever the split. `importance` is a correction's factor for each
    token, which `ludic.training.losses.corrections` sets; a loss that uses `reduce` applies it.
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
        """The largest of `values`; for none, minus infinity, which any other value replaces."""
        top = values.detach().max() if values.numel() else values.new_tensor(-torch.inf)
        return Stat(top, torch.ones_like(top), "max")

    @staticmethod
    def min(values: Float[Tensor, " n"]) -> Stat:
        """The smallest of `values`; for none, infinity, which any other value replaces."""
        low = values.detach().min() if values.numel() else values.new_tensor(torch.inf)
        return Stat(low, torch.ones_like(low), "min")


LossStats = Mapping[str, Stat]
Scope = Literal["token", "turn", "rollout"]


class Loss(Protocol):
    """A function to minimise. The two properties may be plain class attributes.

    `needs_logits` asks for full logits. `scope` says which tokens must be seen together: a loss
    with ratios over a whole turn has "turn", and the turn's tokens then share a micro-batch. A loss
    that needs every batch changed first (a baseline, say) is also a `HasPreprocess`.
    """

    @property
    def needs_logits(self) -> bool: ...

    @property
    def scope(self) -> Scope: ...

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The micro-batch's share of the macro-batch's loss (the shares are added), and stats."""
        ...


@runtime_checkable
class HasParts(Protocol):
    """A loss made of other losses."""

    @property
    def parts(self) -> tuple[Loss, ...]: ...


def parts_of(loss: Loss) -> Iterator[Loss]:
    """Yields a loss and all the losses it is made of."""
    yield loss
    for part in loss.parts if isinstance(loss, HasParts) else ():
        yield from parts_of(part)


class Report(Protocol):
    """What an evaluation found, as an `EvalReport` is."""

    def metrics(self) -> Mapping[str, float]: ...


class Evaluates(Protocol):
    """Says how good the current policy is: `ludic.eval.Evaluator`, as the trainer sees it."""

    async def evaluate(self) -> Report: ...


_ELSEWHERE = {
    "BatchSource": "ludic.training.batching.source",
    "CreditAssigner": "ludic.saw.building",
    "PreprocessFn": "ludic.training.preprocess",
    "Stateful": "ludic.training.algorithm",
    "WorksAhead": "ludic.training.batching.source",
}

if not TYPE_CHECKING:  # which knows them by their own modules

    def __getattr__(name: str) -> Any:
        if name not in _ELSEWHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return resolve(f"{_ELSEWHERE[name]}:{name}")
