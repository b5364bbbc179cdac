"""Sampling ahead: the next batch is made while the trainer trains on this one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ludic.saw.items import SAWBatch
from ludic.training.algorithm import HasAlgorithm, RLAlgorithm
from ludic.training.stateful import Commits, KeepsRecord, Stateful

if TYPE_CHECKING:
    from ludic.training.types import BatchSource


class SamplingAhead:
    """Makes any batch source work one batch ahead. `TrainerConfig(overlap=True)` uses it.

    Two things run at the same time: the source's coroutine on the event loop, and the trainer's
    arithmetic in its own thread. They share only the model, which the sampler reads and the
    optimizer writes. That is safe because the trainer awaits `settle` before it writes to weights
    that a sampler shares. So the batch is sampled entirely under the policy from before the update,
    and is one version behind when it is trained on.
    """

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self._ahead: asyncio.Task[SAWBatch] | None = None

    @property
    def algorithm(self) -> RLAlgorithm | None:
        """The algorithm of the wrapped source."""
        return self.source.algorithm if isinstance(self.source, HasAlgorithm) else None

    async def next_batch(self) -> SAWBatch:
        """The batch that was started, or a new one."""
        task, self._ahead = self._ahead, None
        return await (self.source.next_batch() if task is None else task)

    def start_ahead(self) -> None:
        """Starts the next batch as a task of the running event loop."""
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self.source.next_batch())

    async def settle(self) -> None:
        """Waits until the batch that was started is done."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def drop_ahead(self) -> None:
        """Cancels the batch that was started."""
        task, self._ahead = self._ahead, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def flush_record(self) -> None:
        """Flushes the record of the wrapped source."""
        if isinstance(self.source, KeepsRecord):
            await self.source.flush_record()

    def state_dict(self) -> Mapping[str, Any]:
        """The state of the wrapped source."""
        return self.source.state_dict() if isinstance(self.source, Stateful) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the wrapped source."""
        if isinstance(self.source, Stateful):
            self.source.load_state_dict(state)

    def committed(self, state: Mapping[str, Any]) -> None:
        """Tells the wrapped source."""
        if isinstance(self.source, Commits):
            self.source.committed(state)
