"""The contract of publishing: how new weights reach whatever samples from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn


class LazyWeights(Protocol):
    """Weights that are gathered one by one, so that the whole need not be held at once."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@runtime_checkable
class WeightsOfModel(LazyWeights, Protocol):
    """Weights that know the model they come from, which can then score a publisher's canary."""

    @property
    def model(self) -> nn.Module: ...


Weights: TypeAlias = "Mapping[str, torch.Tensor] | LazyWeights"


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a publish did.

    `details` are for the log. The trainer knows these keys, none of which must be there: `lost`
    (why each server that is out of rotation is, by its address), `stall_s` (how long sampling
    stood still), `canary_max` (the largest difference of a log-prob between trainer and server)
    and `stages` (the seconds of each stage).
    """

    version: int
    seconds: float
    bytes: int = 0
    verified: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


class PolicyPublisher(Protocol):
    """Brings the trainer's weights to the samplers, or raises `PublishError` within a deadline.

    This is all that a trainer asks of a publisher. A class that inherits from it has to write
    `publish` alone: the rest defaults to that of a sampler with a copy of the weights.
    """

    shares_weights: bool = False
    """Whether the sampler uses the trainer's own tensors. Then an optimizer step changes the policy
    at once, so the trainer lets a batch that is being sampled ahead end before it steps."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Held by the trainer while it changes the weights in place. Where the sampler shares
        them, no token is sampled meanwhile; where it has a copy, this does nothing."""
        return nullcontext()

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Makes `weights` policy `version`. Returns when every sampler uses them."""


def named_tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors one by one, whichever kind of weights it is."""
    return iter(weights.items() if isinstance(weights, Mapping) else weights)
