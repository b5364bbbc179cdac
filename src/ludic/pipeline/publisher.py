"""Publishing to actors: the weights by file or by another publisher, and the version by Redis."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Weights, named_tensors
from ludic.pipeline.policies import PolicyFolder
from ludic.pipeline.seat import TrainerSeat


class PipelinePublisher(PolicyPublisher):
    """Makes new weights known to the actors of a run.

    `inner` brings the weights to whatever else samples from them: vLLM servers, or an engine in
    this process. With a `folder` they are also written there, for actors that sample in-process.
    Redis only carries the policy's address, version and checksum, once it is there to be used.
    """

    def __init__(
        self,
        seat: TrainerSeat,
        inner: PolicyPublisher | None = None,
        folder: PolicyFolder | None = None,
    ) -> None:
        self.seat, self.inner, self.folder = seat, inner, folder
        self.shares_weights = inner is not None and inner.shares_weights

    def updating(self) -> AbstractAsyncContextManager[None]:
        return super().updating() if self.inner is None else self.inner.updating()

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        began = time.perf_counter()
        opened = await self.seat.open_async()
        report = None
        if self.inner is not None:
            report = await self.inner.publish(weights, version)
        facts: dict[str, Any] = {}
        if self.folder is not None:
            tensors = [(name, tensor.detach().clone()) for name, tensor in named_tensors(weights)]
            facts = await asyncio.to_thread(
                self.folder.write, tensors, attempt=opened.attempt, version=version
            )
        await asyncio.to_thread(self.seat.announce, version, **facts)
        seconds = time.perf_counter() - began
        if report is None:
            return PublishReport(version, seconds, verified=True)
        return PublishReport(version, seconds, report.bytes, report.verified, report.details)
