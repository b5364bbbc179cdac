"""A run on several ranks, each a process that `torchrun` starts.

Rank 0 runs the stages and does the talking: terminal, folder, servers, episodes. The others take
part in the training of its sharded model. Without a server, rank 0 samples from a copy of a small
model, or not at all.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ludic.errors import ConfigError
from ludic.inference.client import ChatClient
from ludic.runs.model import check_device
from ludic.runs.settings import RunConfig
from ludic.runs.settings.deadlines import newest_published_s
from ludic.runs.storage import RunFolder
from ludic.sharding.ranks import Launched, launched
from ludic.sharding.world import PeerError, World, hearing_of_peers

MOST_PARAMETERS = 600_000_000
"""Of a model that rank 0 holds a whole copy of, beside its shard."""
HOW = (
    "from a copy that is gathered on rank 0 after every update (for trying it out: CPU ranks only)"
)


class Ranks:
    """The ranks of a run. Rank 0 broadcasts what comes next; alone, that does nothing."""

    def __init__(self, mesh: DeviceMesh | None = None, device: torch.device | None = None) -> None:
        self.mesh, self.world = mesh, World.of(mesh, device or torch.device("cpu"))
        self._listening = True
        """Whether the others wait for a message; in the middle of a stage they do not."""

    @staticmethod
    def joined(config: RunConfig) -> Ranks:
        """Joins the other ranks, if `torchrun` started any."""
        here = launched()
        if here.size == 1:
            return Ranks()
        from ludic.sharding.fsdp import init_mesh

        if not here.leads:  # rank 0 says everything that all of them would
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
        device = check_device(config.model)
        mesh = init_mesh(device.type, timeout_s=config.training.rank_timeout_s)
        if device.type == "cuda":
            device = torch.device("cuda", here.local_rank)
        return Ranks(mesh, device)

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.world.size > 1

    async def broadcast(self, **message: Any) -> None:
        """Sends a message to the ranks that listen."""
        await asyncio.to_thread(self.world.share, message)

    async def receive(self) -> dict[str, Any]:
        """Waits for rank 0's next message; raises a `PeerError` if it is that rank 0 failed."""
        return await asyncio.to_thread(self.world.share, None)

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """Tells the others of the end, good or bad. Those that take part in a collective cannot
        hear it: they notice that this rank is gone, or `torchrun` ends them."""
        try:
            with hearing_of_peers(self.world):
                yield
        except Exception as exc:
            if self._listening and not isinstance(exc, PeerError):
                with suppress(RuntimeError):
                    await self.broadcast(error=f"{type(exc).__name__}: {exc}")
            raise
        await self.broadcast(stage="end")

    @asynccontextmanager
    async def stage(self, name: str, folder: RunFolder, version: int = 0) -> AsyncIterator[None]:
        """Inside, all ranks train."""
        await self.broadcast(stage=name, folder=str(folder.path.absolute()), version=version)
        self._listening = False
        yield
        self._listening = True


def check_ranks(config: RunConfig, here: Launched | None = None) -> None:
    """Raises if the run cannot be trained on as many ranks as there are."""
    here = here or launched()
    if here.size == 1:
        return
    where, training = f"on {here.size} ranks", config.training
    device = check_device(config.model)
    on_gpus = device.type == "cuda"
    if config.inference.backend == "local" and samples(config, here) and on_gpus:
        raise ConfigError(
            f"{where} the model is sharded, and the in-process engine cannot sample from it: set "
            'inference.backend = "vllm", with the addresses in inference.servers if servers run '
            'already. A small model can be tried out with model.device = "cpu"'
        )
    if config.inference.publish_lora == "adapter":
        raise ConfigError(
            f'{where} inference.publish_lora = "adapter" does not work: leave it out, and the '
            "adapter is published merged into the weights"
        )
    if training.past_opponents:
        raise ConfigError(
            f"{where} training.past_opponents does not work, since earlier policies play in one "
            "process: set it to 0, or train on one rank"
        )
    if training.rank_timeout_s <= training.batch_timeout_s:
        raise ConfigError(
            f"training.rank_timeout_s={training.rank_timeout_s:g} would end the run while rank 0 "
            f"may still sample a batch: set it above training.batch_timeout_s="
            f"{training.batch_timeout_s:g}, or lower that"
        )
    outside = config.inference.backend == "vllm" or config.pipeline is not None
    if outside and training.rank_timeout_s <= (limit_s := newest_published_s(config)):
        raise ConfigError(
            f"training.rank_timeout_s={training.rank_timeout_s:g} would end the run while rank 0 "
            f"may still publish: set it above {limit_s:g}, or lower training.publish_timeout_s="
            f"{training.publish_timeout_s:g} or inference.vllm.start_timeout_s"
        )
    if not on_gpus:
        return
    if device.index is not None:
        raise ConfigError(
            f"model.device={config.model.device!r} would put all {here.size} ranks on one GPU: set "
            "model.device=cuda, and each takes its own"
        )
    if here.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {here.rank} has no GPU: this machine has {torch.cuda.device_count()}; start "
            "torchrun with a smaller --nproc-per-node, or set model.device=cpu"
        )


def samples(config: RunConfig, here: Launched | None = None) -> bool:
    """Whether the run asks the policy for tokens. On several ranks, a cold start alone does not: it
    needs no sampler, and its evaluations are left out where there is no server."""
    several = (here or launched()).size > 1
    return not several or bool(config.training.steps) or config.inference.backend != "local"


def gathered_copy(model: nn.Module) -> nn.Module:
    """Returns a copy for the in-process engine, with adapters merged, as they are published. It is
    made before the model is sharded. Raises `ConfigError` for a model that is not small."""
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise ConfigError(
            f"on several CPU ranks rank 0 samples from a whole copy of the model, which is for "
            f"models of up to {MOST_PARAMETERS:,} parameters, and this one has {size:,}: set "
            'inference.backend = "vllm", or train on one rank'
        )
    copied = copy.deepcopy(model)
    merge: Any = getattr(copied, "merge_and_unload", None)
    whole: nn.Module = merge() if merge else copied
    return whole.requires_grad_(False)


class NoSampler(ChatClient):
    """Stands where a run has no sampler; asking it is an error."""

    @property
    def max_context_tokens(self) -> int | None:
        return None

    async def complete_tokens(self, request: object) -> NoReturn:
        raise ConfigError(
            "this run has no RL, and on several ranks no sampler: evaluate its "
            "checkpoint with `ludic eval`"
        )

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> NoReturn:
        raise ConfigError("there is no sampler that could take weights")


def describe_model(config: RunConfig, model: nn.Module, ranks: Ranks) -> str:
    """Says how large a run's model is, and how it is sampled from."""
    size, backend = sum(p.numel() for p in model.parameters()), config.inference.backend
    sharded = f", sharded over {ranks.world.size} ranks" if ranks.several else ""
    if not samples(config):
        sampled = "not sampled, since on several ranks a cold start needs no sampler"
    elif backend == "local":
        sampled = f"sampled {HOW if ranks.several else 'in this process'}"
    else:
        sampled = "sampled by vLLM"
    return f"{size:,} parameters{sharded}; {sampled}"
