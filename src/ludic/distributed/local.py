"""Publishers within this process: to a shared module, to a copy, and from many ranks through
one."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from typing import Any, Protocol

from torch import nn

from ludic.distributed.background import BackgroundPublisher
from ludic.distributed.interfaces import (
    PolicyPublisher,
    PublishReport,
    Snapshot,
    Weights,
    named_tensors,
)
from ludic.distributed.shards import ranks_share_memory, write_shards
from ludic.errors import PublishError
from ludic.inference.client import VersionedClient, check_version
from ludic.sharding.weights import ModelWeights
from ludic.sharding.world import World


class SharingClient(VersionedClient, Protocol):
    """A client that samples from the trainer's own module."""

    def samples_from(self, model: nn.Module) -> bool: ...

    def updating(self) -> AbstractAsyncContextManager[None]: ...


class LocalPolicyPublisher(PolicyPublisher):
    """For a sampler in this process that shares the module: only the version is told.

    While the weights change in place, the client samples nothing.
    """

    shares_weights = True

    def __init__(self, client: SharingClient) -> None:
        self.client = client
        self._model: nn.Module | None = None  # the module that the client was seen to sample from

    def updating(self) -> AbstractAsyncContextManager[None]:
        return self.client.updating()

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Stamps `version` on what is sampled from now on. No tensors are passed, since the client
        has them: those of a lazy source may be merged copies, which are not the module's own."""
        start = time.perf_counter()
        if isinstance(weights, ModelWeights) and weights.model is not self._model:
            if not self.client.samples_from(weights.model):
                raise PublishError(
                    "the client does not sample from the module that is trained, so no update "
                    "would reach it: make the client with that very module, after any adapter was "
                    "added, or use LocalCopyPublisher for a client that has a copy"
                )
            self._model = weights.model
        await self.client.sync_weights({}, version=version)
        await check_version(self.client, version)
        return PublishReport(version, time.perf_counter() - start, verified=True)


class LocalCopyPublisher(PolicyPublisher):
    """For a sampler in this process that has a copy of the weights: every publish copies them."""

    def __init__(self, client: SharingClient) -> None:
        self.client = client

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Copies the weights between two tokens, all at once."""
        start, params = time.perf_counter(), dict(named_tensors(weights))
        await self.client.sync_weights(params, version=version)
        size = sum(tensor.numel() * tensor.element_size() for tensor in params.values())
        return PublishReport(version, time.perf_counter() - start, size, verified=True)


class Rank0OnlyPublisher(PolicyPublisher):
    """Lets rank 0 publish for all ranks, through `inner`, which only rank 0 needs.

    Where all ranks are on one host, each writes its shard into a file in shared memory; else they
    are gathered one by one, on every rank. Only then are they sent: collectives of the trainer
    never run between those of the transfer, so the two cannot wait for each other. The others
    learn whether it worked.
    """

    def __init__(self, inner: PolicyPublisher | None, world: World) -> None:
        if world.leads and inner is None:
            raise PublishError("rank 0 has no publisher to publish through")
        self.inner, self.world = inner if world.leads else None, world
        self.shares_weights = self.inner is not None and self.inner.shares_weights
        if self.inner is None or self.inner.longest_s is not None:
            self.longest_s = math.inf  # gathering has the group's deadline, sending its own

    def updating(self) -> AbstractAsyncContextManager[None]:
        return super().updating() if self.inner is None else self.inner.updating()

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Gathers everywhere, sends from rank 0, and returns the same report on all ranks."""
        if isinstance(self.inner, BackgroundPublisher):
            self.inner.drop_waiting()  # else three copies would be in memory
        gathered = await asyncio.to_thread(self._gather, weights)
        answer: dict[str, Any] = {}
        failure: BaseException | None = None
        if self.inner is not None:
            try:
                report = await self.inner.publish(gathered, version)
                answer = asdict(replace(report, details=dict(report.details)))
            except Exception as exc:
                failure, answer = exc, {"error": f"{type(exc).__name__}: {exc}"}
        answer = await asyncio.to_thread(self.world.share, answer)
        if failure is not None:
            raise failure
        return PublishReport(**answer)

    async def settle(self) -> None:
        """Waits on rank 0, for what only that knows."""
        if self.inner is not None:
            await self.inner.settle()

    async def abandon(self) -> None:
        if self.inner is not None:
            await self.inner.abandon()

    def _gather(self, weights: Weights) -> Snapshot:
        """All weights in rank 0's host memory; the other ranks take part and keep nothing."""
        alone = self.world.size == 1
        if isinstance(weights, ModelWeights) and not alone and ranks_share_memory(self.world):
            shared = write_shards(weights, self.world) or Snapshot({})
            shared.device = self.world.device
            return shared
        gathered = {}
        for name, tensor in named_tensors(weights):
            if self.world.leads:
                gathered[name] = tensor.to("cpu", copy=True)
        return Snapshot(gathered, device=self.world.device)
