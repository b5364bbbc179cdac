"""The contract of publishing: how new weights reach whatever samples from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

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


class Snapshot(dict[str, "torch.Tensor"]):
    """A copy of the weights that stays as it is while the trainer goes on. `model` is the module
    that it was taken of, which has moved on; `device` is where the trainer's own weights are."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        model: nn.Module | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(tensors)
        self.model, self.device = model, device


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a publish did.

    `details` are for the log. The trainer knows these keys, none of which must be there: `lost`
    (why each server that is out of rotation is, by its address), `stall_s` (how long sampling
    stood still), `canary_max` (the largest difference of a log-prob between trainer and server),
    `stages` (the seconds of each stage), and of one in the background `background_s` (how long it
    took) and `behind` (by how many versions the samplers were behind the trainer).
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

    snapshots: Literal["none", "host", "device"] = "none"
    """Whether `publish` may be given a `Snapshot`, after the trainer has moved on, and where that
    has to be kept: in the host's memory or on the trainer's device."""

    longest_s: float | None = None
    """How long `publish` takes at most by its own deadlines, clean-up included; None: it has none.
    Whoever waits for it gives it more than that."""

    def snapshot_of(self, weights: Weights) -> Weights:
        """What of the weights a snapshot has to hold. Called in a thread; on several ranks reading
        what it returns may be a collective."""
        return weights

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Held by the trainer while it changes the weights in place. Where the sampler shares
        them, no token is sampled meanwhile; where it has a copy, this does nothing."""
        return nullcontext()

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Makes `weights` policy `version`. Returns when every sampler uses them, or will
        (`BackgroundPublisher`): `settle` waits for that."""

    async def prepare(self, weights: Weights, version: int) -> None:
        """Hears that a snapshot of `weights` follows as policy `version`, or a newer one does."""
        return

    async def read_model(self, weights: Weights, version: int) -> None:
        """Reads what only the live model can tell of `version`, while a snapshot is taken. The
        trainer changes its weights afterwards, but may compute with them meanwhile."""
        return

    async def settle(self) -> None:
        """Returns when what was given to `publish` is what the samplers use; raises if that
        failed. The trainer awaits it where the next tokens must be of the newest version."""
        return

    async def abandon(self) -> None:
        """Drops what is not published yet: the trainer has failed, or was cancelled."""
        return


def named_tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors one by one, whichever kind of weights it is."""
    return iter(weights.items() if isinstance(weights, Mapping) else weights)
