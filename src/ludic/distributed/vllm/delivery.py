"""What the two kinds of publish have in common, and the few steps in which they differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from ludic.distributed.interfaces import Weights
from ludic.distributed.vllm.canary import Canary
from ludic.distributed.vllm.server_update import ServerUpdate
from ludic.distributed.vllm.timing import PublishTimes, together
from ludic.errors import PublishError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.replica import Replica

Server = TypeVar("Server", bound=ServerUpdate)


@dataclass(frozen=True, slots=True)
class Job:
    """One publish: what, under which version, to whom, and within which limits. `model` is the one
    that scores the canary; None: there is no canary."""

    client: VLLMChatClient
    tensors: Mapping[str, Tensor]
    version: int
    model: nn.Module | None
    canary: Canary
    times: PublishTimes
    timeout_s: float
    patience_s: float


class Delivery(ABC, Generic[Server]):
    """One publish on its way: `stage`, then `use`; or `undo` where `stage` failed. Always `close`.

    `servers` are those that are still part of it.
    """

    verified = True

    def __init__(self, job: Job, servers: list[Server]) -> None:
        self.job, self.servers = job, servers

    async def each(self, step: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Has the servers do a step side by side, and goes on with those that are left."""
        await together(step(server) for server in self.servers)
        self.drop_lost()

    def drop_lost(self) -> None:
        """Goes on without servers that are lost; raises where none is left."""
        left = [server for server in self.servers if not server.lost]
        if not left:
            why = "; ".join(server.replica.describe() for server in self.servers)
            raise PublishError(f"no server is left for version {self.job.version}: {why}")
        self.servers = left

    @abstractmethod
    async def stage(self) -> None:
        """Everything before a token can be sampled from the new version, checks included."""

    @abstractmethod
    async def use(self) -> None:
        """Lets the servers sample from the new version. One that fails here is lost."""

    @abstractmethod
    async def undo(self, *, late: bool) -> None:
        """Has the servers forget what was staged. `late`: the deadline has passed."""

    async def check(self) -> None:
        """What can be checked only when the new version is in use."""

    async def close(self) -> None:
        """Frees what was held for the publish."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """For the report."""


class Payload(ABC):
    """What a publisher brings to its servers. One per publisher: it may keep what later publishes
    need, and is used by one of them at a time."""

    restores = False
    """Whether a server that was away can be brought up to date between two publishes."""

    @abstractmethod
    def gather(self, weights: Weights) -> dict[str, Tensor]:
        """The tensors to send. Called in a thread."""

    @abstractmethod
    def delivery(self, job: Job) -> Delivery[Any]:
        """Begins a publish."""

    async def restore(self, replica: Replica, patience_s: float) -> bool:
        """Brings a server that was away up to date; False: that takes a publish."""
        return False

    async def close(self) -> None:  # noqa: B027
        """Takes back what was published, where that can be done."""

    def state(self, replica: Replica) -> str:
        """How a server is, for an error."""
        return replica.describe()
