"""Which rank this is, the few collectives that the trainer needs (no pickle on the wire), and what
to do when its device has no memory left."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ludic.errors import LudicError


class PeerError(LudicError):
    """Another rank failed; its message follows."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that train together; alone, every collective is the identity.

    The process group's timeout bounds every collective here.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def of(mesh: DeviceMesh | None, device: torch.device) -> World:
        """The world of `mesh`, or of one process alone."""
        if mesh is None or mesh.size() == 1:
            return World(device=device)
        group = mesh.get_group()
        return World(dist.get_rank(group), dist.get_world_size(group), group, device)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, value: Mapping[str, Any] | None) -> dict[str, Any]:
        """Rank 0's `value`, on every rank. A value with the key `error` raises on the others."""
        if self.group is None:
            return dict(value or {})
        data = msgspec.msgpack.encode(value) if self.leads else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        dist.broadcast(size, group=self.group, group_src=0)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.leads:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, group=self.group, group_src=0)
        if self.leads:
            return dict(value or {})
        shared: dict[str, Any] = msgspec.msgpack.decode(buffer.cpu().numpy().tobytes())
        if "error" in shared:
            raise PeerError(f"rank 0 failed: {shared['error']}")
        return shared

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.group is not None:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def largest(self, *values: float) -> list[float]:
        """The largest of the ranks' values, for each of them."""
        if self.group is None:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in shared.tolist()]

    def agree(self, error: BaseException | None) -> None:
        """Raises on every rank when any of them has an error, its own where it has one."""
        failed = torch.tensor([0.0 if error is None else 1.0], device=self.device)
        if self.group is not None:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if error is not None:
            raise error
        if failed.item():
            raise PeerError("another rank failed; its own message says why")


@contextmanager
def hearing_of_peers(world: World) -> Iterator[None]:
    """Turns what a collective raises when another rank is gone, or late, into a `PeerError`."""
    try:
        yield
    except RuntimeError as exc:
        reason = str(exc).partition("\n")[0]
        if world.group is None or not (isinstance(exc, dist.DistError) or "gloo/" in reason):
            raise
        raise PeerError(f"rank {world.rank} lost the other ranks: {reason}") from exc


def work_on(device: torch.device) -> None:
    """For a new thread, which begins on the first GPU whichever its rank's is, and with as many
    threads for products on the CPU as there are cores, whatever `torch.set_num_threads` said."""
    torch.get_num_threads()  # which takes up for this thread what was set
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether torch raised this for want of memory, on a GPU or on the host."""
    if isinstance(exc, torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and "can't allocate memory" in str(exc)


def release_memory() -> None:
    """Gives back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
