"""The contract of publishing: how new weights reach whatever samples from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch


class LazyWeights(Protocol):
    """Weights that are gathered one by one, so that the whole need not be held at once."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


Weights: TypeAlias = "Mapping[str, torch.Tensor] | LazyWeights"


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a publish did. `details` are for the log: where it has stages, the seconds of each are
    in `details["stages"]`."""

    version: int
    seconds: float
    bytes: int = 0
    verified: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


class PolicyPublisher(Protocol):
    """Brings the trainer's weights to the samplers, or raises `PublishError` within a deadline.

    `shares_weights` says that the sampler reads the trainer's own tensors: then nothing may be
    sampling while they change. It may be a plain class attribute.
    """

    @property
    def shares_weights(self) -> bool: ...

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Held by the trainer while it changes the weights in place. Where the sampler shares the
        module, no token is sampled meanwhile; where it has a copy, this does nothing."""
        ...

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Makes `weights` policy `version`. Returns when every sampler uses them."""
        ...
