"""Chooses the plane for the weights from where the trainer and the servers' workers are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ludic.distributed.addresses import is_here
from ludic.errors import ConfigError, DeadlineError, InferenceError
from ludic.inference.vllm.flags import PLACE
from ludic.plumbing.files import boot_id

if TYPE_CHECKING:
    import torch

    from ludic.inference.vllm.client import VLLMChatClient
    from ludic.inference.vllm.rotation import Replica

ChosenPlane = Literal["shared_memory", "ipc", "nccl", "gloo", "http"]
PlaneName = Literal["auto", ChosenPlane]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is: whose shared memory it sees, and on which GPU it computes."""

    memory: str
    """The same for two processes that can open each other's files in shared memory: two containers
    on one host usually cannot."""
    gpu: str | None = None
    """The GPU's UUID; None: the CPU."""
    guessed: bool = field(default=False, compare=False)
    """Whether this was only inferred from an address."""

    @staticmethod
    def of(device: torch.device) -> Place:
        """The place of this process, which computes on `device`."""
        if device.type != "cuda":
            return Place(shared_memory_id())
        from torch.cuda import get_device_properties

        return Place(shared_memory_id(), str(get_device_properties(device).uuid))

    @staticmethod
    def read(answer: Any) -> Place | None:
        """The place that a worker said it is at; None where it said nothing of the kind."""
        if not isinstance(answer, Mapping) or not isinstance(answer.get("memory"), str):
            return None
        gpu = answer.get("gpu")
        return Place(answer["memory"], None if gpu is None else str(gpu))


def shared_memory_id() -> str:
    """Returns a name for the shared memory that this process sees: this boot of the host, and the
    file system that is mounted there."""
    mounted = 0
    with suppress(OSError):  # not on every system
        mounted = os.stat("/dev/shm").st_dev
    return f"{boot_id()}/{mounted}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A plane, and why it is that one."""

    plane: ChosenPlane
    why: str


_PREFERRED = (
    Choice("ipc", "every worker is on the trainer's GPU"),
    Choice("shared_memory", "every worker sees this host's shared memory"),
    Choice("nccl", "a worker is on another host, and everybody has a GPU of its own"),
)


def choose_plane(
    trainer: Place, workers: Sequence[Place], *, named: PlaneName = "auto", gathered: bool = False
) -> Choice:
    """Returns the plane for a trainer and all workers of its servers: the one rule that runs, the
    library and the examples ask. `gathered`: the weights are in the host's memory, where several
    ranks or a snapshot put them.

    On one host: CUDA IPC if everybody is on one GPU, else a file in shared memory. Between hosts
    NCCL if everybody has a GPU that nobody else has, which it demands, else HTTP, which brings a
    file to each host once. Gloo, a broadcast to every worker, has to be named. A sampler in the
    trainer's own process needs no plane. One that is `named` is taken if it can work; else
    `ConfigError` says why not. What was only guessed of a worker refuses nothing.
    """
    if named != "auto":
        surely = [worker for worker in workers if not worker.guessed]
        if (why_not := _objection(named, trainer, surely, gathered)) is not None:
            fits = choose_plane(trainer, workers, gathered=gathered)
            raise ConfigError(
                f'the plane "{named}" cannot work here: {why_not}; "{fits.plane}" can, or leave '
                "it out"
            )
        return Choice(named, "it was named")
    for choice in _PREFERRED:
        if (why_not := _objection(choice.plane, trainer, workers, gathered)) is None:
            return choice
    return Choice("http", f"a worker is on another host, and NCCL is not possible: {why_not}")


def _objection(
    plane: ChosenPlane, trainer: Place, workers: Sequence[Place], gathered: bool
) -> str | None:
    """Why a plane cannot work; None if it can."""
    gpus = [trainer.gpu, *(worker.gpu for worker in workers)]
    far = sum(worker.memory != trainer.memory for worker in workers)
    if plane == "shared_memory" and far:
        return f"{far} of {len(workers)} workers do not see this host's shared memory"
    if plane in ("ipc", "nccl") and trainer.gpu is None:
        return "the trainer's weights are not on a GPU"
    if plane == "ipc":
        if gathered:
            return "the weights are in the host's memory, and CUDA IPC shares that of a GPU"
        if elsewhere := sum(gpu != trainer.gpu for gpu in gpus):
            return f"{elsewhere} of {len(workers)} workers are not on the trainer's GPU"
        if far:
            return f"{far} of {len(workers)} workers are in another container"
    if plane == "nccl":
        if lacking := gpus.count(None):
            return f"{lacking} of {len(workers)} workers have no GPU"
        if len(set(gpus)) < len(gpus):
            return "two processes share a GPU, which NCCL refuses"
    return None


async def ask_places(client: VLLMChatClient, here: Place, timeout_s: float) -> list[Place]:
    """Where the workers of all servers are. One that does not say is taken to be beside the trainer
    if its address is this machine's."""
    asked = (_places(client, replica, here, timeout_s) for replica in client.replicas)
    return [place for places in await asyncio.gather(*asked) for place in places]


async def _places(
    client: VLLMChatClient, replica: Replica, here: Place, timeout_s: float
) -> list[Place]:
    try:
        answer = await client.control(
            replica, "POST", "/collective_rpc", body={"method": PLACE}, timeout_s=timeout_s
        )
        places = [Place.read(result) for result in answer["results"]]
    except (InferenceError, DeadlineError, KeyError, TypeError):
        places = [None]
    if all(places):
        return [place for place in places if place]
    near = await asyncio.to_thread(is_here, replica.url)
    gpu = here.gpu if near or here.gpu is None else f"of {replica.url}"
    guess = Place(here.memory if near else "elsewhere", gpu, guessed=True)
    return [place or guess for place in places]
