"""How tensors travel from the trainer to the servers; control is always HTTP.

A plane makes a `Shipment` of the weights before it contacts any server. The shipment's `update`
goes to each server; `move`, if it has one, sends the tensors while the servers receive.
"""

from __future__ import annotations

import secrets
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ludic.distributed.addresses import is_loopback, own_address
from ludic.distributed.vllm.ipc_handles import Exports, meta_of
from ludic.distributed.vllm.placement import Choice, Place, PlaneName, ask_places, choose_plane
from ludic.distributed.vllm.shared_memory import SharedWeights, write_shared
from ludic.distributed.weights_http import PolicyServer
from ludic.errors import ConfigError, DeadlineError, PublishError
from ludic.plumbing.cuda_streams import aside, wait_for

if TYPE_CHECKING:
    from ludic.inference.vllm.client import VLLMChatClient


class BroadcastGroup:
    """A trainer and its samplers, in a process group apart from any default one: GPUs over NCCL,
    CPUs over gloo. They meet at `host:port`, where rank 0 listens; only rank 0 sends. Every wait
    ends after `timeout_s`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: str = "nccl",
        timeout_s: float = 120.0,
        device: torch.device | None = None,
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        self.rank, self.size, self.timeout_s = rank, world_size, timeout_s
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=True
            )
        except dist.DistStoreError as exc:
            raise DeadlineError(f"{world_size} ranks to meet", f"{host}:{port}", timeout_s) from exc
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            if device is not None:
                torch.cuda.set_device(device)
            self._group = dist.ProcessGroupNCCL(self._store, rank, world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, rank, world_size, limit)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values into everybody's `tensor`, which must be contiguous."""
        self._group.broadcast(tensor, 0).wait()

    def receive(
        self, metas: Iterable[Mapping[str, Any]], device: torch.device | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors that rank 0 sends one by one, by name; `metas` are those of its update."""
        for meta in metas:
            dtype = getattr(torch, meta["dtype"])
            tensor = torch.empty(meta["shape"], dtype=dtype, device=device)
            self.broadcast(tensor)
            yield meta["name"], tensor

    def close(self) -> None:
        """Leaves; peers that still wait get an error, or their own deadline."""
        shutdown = getattr(self._group, "abort", None) or getattr(self._group, "shutdown", None)
        if shutdown is not None:
            with suppress(RuntimeError, NotImplementedError):
                shutdown()


@dataclass(frozen=True, slots=True)
class Shipment:
    """Weights on their way. `close` frees what was held for them."""

    update: Mapping[str, Any]
    move: Callable[[], None] | None = None
    close: Callable[[], object] = bool


class DataPlane(ABC):
    """A way for tensors to travel. Most planes only have to `prepare` them."""

    name: str

    @abstractmethod
    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        """Gets the tensors ready to be fetched or sent. Called in a thread."""

    @property
    def joins(self) -> bool:
        """Whether servers have to join."""
        return type(self).invitation is not DataPlane.invitation

    def invitation(self, workers: int, timeout_s: float) -> Mapping[str, Any] | None:
        """What servers with `workers` workers together need to join; None: nothing (any more)."""
        return None

    def join(self) -> None:  # noqa: B027
        """Takes the trainer's own place, while the servers take theirs. Called in a thread."""

    def abandon(self) -> None:  # noqa: B027
        """After a failure: drops what the two sides may no longer agree on."""

    def close(self) -> None:
        """Nothing more is sent."""
        self.abandon()


class SharedMemoryPlane(DataPlane):
    """A safetensors file in shared memory: servers on this machine, with or without a GPU."""

    name = "shared_memory"

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        path, remove = _file_with(weights)
        return Shipment({"plane": "shared_memory", "path": str(path)}, close=remove)


def _file_with(weights: Mapping[str, Tensor]) -> tuple[Path, Callable[[], object]]:
    """A file in shared memory that has the weights, and what removes it after the publish."""
    if isinstance(weights, SharedWeights):  # which are in such a file already
        return weights.path, bool
    path, folder = write_shared(weights)
    return path, folder.close


class HTTPPlane(DataPlane):
    """A file that each host of servers fetches once by HTTP, in pieces with checksums, and that all
    workers there map; hosts pass pieces on to each other. `host` is an address of the trainer that
    the servers reach, `port` one that is open to them (None: any that is free); nobody without the
    plane's key gets anything. `timeout_s` is how long a host may take."""

    name = "http"

    def __init__(
        self, *, host: str = "127.0.0.1", port: int | None = None, timeout_s: float = 600.0
    ) -> None:
        self.host, self.port, self.timeout_s = host, port, timeout_s
        self._server: PolicyServer | None = None

    @property
    def url(self) -> str:
        """Where it listens; empty before the first publish."""
        return "" if self._server is None else self._server.url

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        if self._server is None:
            self._server = PolicyServer(secrets.token_hex(32), self.host, self.port or 0)
            weakref.finalize(self, self._server.close)
        server = self._server
        path, remove = _file_with(weights)
        source = server.offer(path)

        def close() -> None:
            server.withdraw(source["checksum"])
            remove()

        source["timeout_s"] = self.timeout_s
        return Shipment({"plane": "http", "source": source}, close=close)

    def abandon(self) -> None:
        # It listens on: hosts that fetch hear that there is nothing more, and end at once.
        if self._server is not None:
            self._server.withdraw()

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


class IPCPlane(DataPlane):
    """CUDA IPC: the servers read the trainer's tensors on the GPU that they share."""

    name = "ipc"

    def __init__(self) -> None:
        self._exports = Exports()

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        tensors: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if tensor.device.type != "cuda":
                raise PublishError(
                    f"{name} is on {tensor.device}: IPC needs the trainer's weights on the GPU "
                    "that it shares with the servers; publish over shared memory instead"
                )
            tensors[name] = tensor.detach().contiguous()
        update = {"plane": "ipc", **self._exports.describe(tensors)}
        wait_for(tensors.values())  # those that were laid out anew

        def close() -> None:
            tensors.clear()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

        return Shipment(update, close=close)


class BroadcastPlane(DataPlane):
    """A broadcast from the trainer to every worker: NCCL between GPUs, gloo between CPUs.

    `host` is an address of the trainer that the servers reach, `port` one that is open to them
    (None: any that is free), `device` the trainer's GPU for NCCL (None: the current one). Each
    worker holds the new weights beside the old ones until they are checked.
    """

    name = "broadcast"

    def __init__(
        self,
        *,
        backend: str = "nccl",
        host: str = "127.0.0.1",
        port: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if backend not in ("nccl", "gloo"):
            raise ConfigError(f"BroadcastPlane(backend={backend!r}): must be 'nccl' or 'gloo'")
        self.backend, self.host, self._wanted_port = backend, host, port
        self.device = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
        if self.device.type == "cuda" and self.device.index is None:  # `set_device` needs one
            index = torch.cuda.current_device() if torch.cuda.is_available() else 0
            self.device = torch.device("cuda", index)
        self._invitation: dict[str, Any] = {}
        self._group: BroadcastGroup | None = None

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        tensors = {name: tensor.detach() for name, tensor in weights.items()}
        metas = [meta_of(*pair) for pair in tensors.items()]

        def move() -> None:
            if self._group is None:
                raise PublishError("the broadcast group is not open")
            # One at a time beside the trainer's own weights, and not behind its work.
            with aside([torch.empty(0, device=self.device)]):
                for tensor in tensors.values():
                    self._group.broadcast(tensor.to(self.device).contiguous())

        return Shipment({"plane": "broadcast", "tensors": metas}, move, tensors.clear)

    def invitation(self, workers: int, timeout_s: float) -> Mapping[str, Any] | None:
        if self._group is not None and self._invitation["world_size"] == workers + 1:
            return None
        self.abandon()
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((self.host, self._wanted_port or 0))
            port = int(free.getsockname()[1])
        self._invitation = {
            "host": self.host,
            "port": port,
            "world_size": workers + 1,
            "backend": self.backend,
            "timeout_s": timeout_s,
        }
        return self._invitation

    def join(self) -> None:
        device = self.device if self.device.type == "cuda" else None
        self._group = BroadcastGroup(**self._invitation, rank=0, device=device)

    def abandon(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


async def open_plane(
    client: VLLMChatClient,
    device: torch.device,
    *,
    named: PlaneName = "auto",
    gathered: bool = False,
    host: str | None = None,
    port: int | None = None,
    timeout_s: float = 60.0,
    publish_s: float = 600.0,
) -> tuple[DataPlane, Choice]:
    """Asks the servers where their workers are, and returns the plane that `choose_plane` says for
    a trainer on `device`, and why. A broadcast is told that device; it and HTTP listen at `host`
    and `port`, or at the address of this machine that the first server elsewhere sees. `publish_s`
    is the deadline of a publish, within which hosts have to fetch."""
    here = Place.of(device)
    workers = await ask_places(client, here, timeout_s)
    choice = choose_plane(here, workers, named=named, gathered=gathered)
    if choice.plane == "shared_memory":
        return SharedMemoryPlane(), choice
    if choice.plane == "ipc":
        return IPCPlane(), choice
    if host is None:  # loopback only where no server is elsewhere
        addresses = [own_address(replica.url) for replica in client.replicas]
        host = next((address for address in addresses if not is_loopback(address)), addresses[0])
    if choice.plane == "http":
        return HTTPPlane(host=host, port=port, timeout_s=publish_s), choice
    own = device if choice.plane == "nccl" else None
    return BroadcastPlane(backend=choice.plane, host=host, port=port, device=own), choice


def check_plane(name: str) -> PlaneName:
    """Returns the name if a plane has it."""
    names: tuple[PlaneName, ...] = get_args(PlaneName)
    for plane in names:
        if name == plane:
            return plane
    raise ConfigError(f"unknown data plane {name!r}: one of {', '.join(names)}, or your own")
