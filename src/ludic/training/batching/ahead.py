"""Batch sources that wrap others, such as the one that works a batch ahead. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ludic.errors import ConfigError
from ludic.saw.items import SAWBatch
from ludic.training.batching.source import (
    BatchSource,
    GivesBatches,
    Published,
    WorksAhead,
    as_source,
)
from ludic.workers.deadlines import ended

if TYPE_CHECKING:
    from torch import nn

    from ludic.training.config import TrainerConfig


class WrappedSource(BatchSource):
    """A source around another one. It has the other's algorithm and record, and the other's state
    as `source` in its own."""

    def __init__(self, source: GivesBatches) -> None:
        self.source = as_source(source)
        self.algorithm = self.source.algorithm
        self.waits_for_publish = self.source.waits_for_publish

    def changes(self, model: nn.Module) -> bool:
        return self.source.changes(model)

    def refers_to(self, model: nn.Module) -> bool:
        return self.source.refers_to(model)

    def state_dict(self) -> Mapping[str, Any]:
        return {"source": self.source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["source"] is not None:  # as older checkpoints have it of a source without state
            self.source.load_state_dict(state["source"])

    async def flush_record(self) -> None:
        await self.source.flush_record()

    def committed(self, state: Mapping[str, Any]) -> None:
        self.source.committed(state["source"])


class SamplingAhead(WrappedSource, WorksAhead):
    """Makes any batch source work one batch ahead. `TrainerConfig(overlap=True)` uses it.

    Two things run at the same time: the source's coroutine on the event loop, and the trainer's
    arithmetic in its own thread. They share only the model, which the sampler reads and the
    optimizer writes. That is safe because the trainer awaits `settle` before it writes to weights
    that a sampler shares. So the batch is sampled entirely under the policy from before the update,
    and is one version behind when it is trained on: it begins when `published` says that this
    policy is there. The state is that of the source, without more.
    """

    def __init__(self, source: GivesBatches, published: Published | None = None) -> None:
        super().__init__(source)
        self._published = published if self.waits_for_publish else None
        self._ahead: asyncio.Task[SAWBatch] | None = None

    async def next_batch(self) -> SAWBatch:
        """The batch that was started, or a new one."""
        task, self._ahead = self._ahead, None
        return await (self.source.next_batch() if task is None else task)

    def start_ahead(self) -> None:
        """Starts the next batch as a task of the running event loop."""
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self._begin())

    async def _begin(self) -> SAWBatch:
        if self._published is not None:
            await self._published()
        return await self.source.next_batch()

    async def settle(self) -> None:
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def drop_ahead(self) -> None:
        task, self._ahead = self._ahead, None
        if task is not None:
            await ended(task)

    def state_dict(self) -> Mapping[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)

    def committed(self, state: Mapping[str, Any]) -> None:
        self.source.committed(state)


def check_scored(source: BatchSource, model: nn.Module, cfg: TrainerConfig) -> None:
    """Raises `ConfigError` where the trained model may not score what it is trained on."""
    if source.works_ahead and source.changes(model):
        raise ConfigError(
            "the next batch would be scored with the trained model, or its base, while it is "
            "trained: turn `overlap` off, or give LocalScores a model of its own"
        )
    if cfg.updates_per_batch == 1 and source.refers_to(model):
        raise ConfigError(
            "the reference is the trained model itself, so that its KL is always 0: give "
            "LocalScores a model of its own, such as copy.deepcopy(model) from before the "
            "training, or without_adapter=True for the base of an adapter"
        )
