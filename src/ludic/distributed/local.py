"""Publishers that move no weights themselves: the shared module, and many ranks with one voice."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Weights
from ludic.errors import PublishError
from ludic.sharding.world import World


class SharingClient(Protocol):
    """A client that samples from the trainer's own module."""

    def updating(self) -> AbstractAsyncContextManager[None]: ...

    def set_version(self, version: int) -> Any: ...


class LocalPolicyPublisher:
    """For a sampler in this process that shares the module: only the version is told.

    While the weights change in place, the client samples nothing.
    """

    shares_weights = True

    def __init__(self, client: SharingClient) -> None:
        self.client = client

    def updating(self) -> AbstractAsyncContextManager[None]:
        return self.client.updating()

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Stamps `version` on what is sampled from now on."""
        start = time.perf_counter()
        done = self.client.set_version(version)
        if inspect.isawaitable(done):
            await done
        return PublishReport(version, time.perf_counter() - start, verified=True)


class Rank0OnlyPublisher:
    """Lets rank 0 publish for all ranks, through `inner`, which only rank 0 needs.

    The shards are gathered first, on every rank, and only then sent: collectives of the trainer
    never run between those of the transfer, so the two cannot wait for each other. The others
    learn whether it worked.
    """

    def __init__(self, inner: PolicyPublisher | None, world: World) -> None:
        if world.leads and inner is None:
            raise PublishError("rank 0 has no publisher to publish through")
        self.inner, self.world = inner, world
        self.shares_weights = inner is not None and inner.shares_weights

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        if self.world.leads and self.inner is not None:
            async with self.inner.updating():
                yield
        else:
            yield

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Gathers everywhere, sends from rank 0, and answers on all."""
        gathered = await asyncio.to_thread(self._gather, weights)
        answer: dict[str, Any] = {}
        failure: BaseException | None = None
        if self.world.leads and self.inner is not None:
            try:
                report = await self.inner.publish(gathered, version)
                answer = {
                    "version": report.version,
                    "seconds": report.seconds,
                    "bytes": report.bytes,
                    "verified": report.verified,
                    "details": dict(report.details),
                }
            except Exception as exc:
                failure, answer = exc, {"error": f"{type(exc).__name__}: {exc}"}
        answer = await asyncio.to_thread(self.world.share, answer)
        if failure is not None:
            raise failure
        return PublishReport(**answer)

    def _gather(self, weights: Weights) -> dict[str, Any]:
        """All weights on rank 0's CPU; the other ranks take part and keep nothing."""
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        gathered = {}
        for name, tensor in pairs:
            if self.world.leads:
                gathered[name] = tensor.to("cpu", copy=True)
        return gathered
