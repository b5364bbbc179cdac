"""Which plane the weights take: it follows from where the trainer and the servers' workers are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

PlaneName = Literal["auto", "shared_memory", "ipc", "nccl", "gloo"]
ChosenPlane = Literal["shared_memory", "ipc", "nccl", "gloo"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is: whose shared memory it sees, and on which GPU it computes."""

    memory: str
    """The same for two processes that can open each other's files in shared memory: two containers
    on one host usually cannot."""
    gpu: str | None = None
    """The GPU's UUID; None: the CPU."""

    @staticmethod
    def of(device: torch.device) -> Place:
        """The place of this process, which computes on `device`."""
        if device.type != "cuda":
            return Place(shared_memory_id())
        from torch.cuda import get_device_properties

        return Place(shared_memory_id(), str(get_device_properties(device).uuid))

    @staticmethod
    def read(said: Any) -> Place | None:
        """The place that a worker said it is at; None where it said nothing of the kind."""
        if not isinstance(said, Mapping) or not isinstance(said.get("memory"), str):
            return None
        gpu = said.get("gpu")
        return Place(said["memory"], None if gpu is None else str(gpu))


def shared_memory_id() -> str:
    """Returns a name for the shared memory that this process sees: this boot of the host, and the
    file system that is mounted there."""
    boot, mounted = "", 0
    with suppress(OSError):  # not on every system
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with suppress(OSError):
        mounted = os.stat("/dev/shm").st_dev
    return f"{boot}/{mounted}"


def choose_plane(
    trainer: Place, workers: Sequence[Place], *, gathered: bool = False
) -> ChosenPlane:
    """Returns the plane for a trainer and all workers of its servers. `gathered`: the weights are
    those of several ranks, which rank 0 has in its host's memory.

    On one host: CUDA IPC if everybody is on one GPU, else a file in shared memory. Between hosts a
    broadcast: NCCL if everybody has a GPU that nobody else has, which it demands, else gloo.
    """
    gpus = [trainer.gpu, *(worker.gpu for worker in workers)]
    if all(worker.memory == trainer.memory for worker in workers):
        one_gpu = trainer.gpu is not None and set(gpus) == {trainer.gpu}
        return "ipc" if one_gpu and not gathered else "shared_memory"
    return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"
