"""The contract of batch sources, and what wraps one. Imports no torch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from ludic.saw.items import SAWBatch, SAWItem
from ludic.training.algorithm import RLAlgorithm

ANY_AGE = "ludic.any_age"
"""Set in the `meta` of an item to which the trainer's `max_lag` does not apply: its source bounds
the age itself (a replay buffer, the pipeline), or its versions are not this trainer's (stored
data)."""


def of_any_age(item: SAWItem) -> SAWItem:
    """The item, marked as one that the trainer takes whatever its age."""
    return replace(item, meta={**item.meta, ANY_AGE: True})


def batch_of_any_age(batch: SAWBatch) -> SAWBatch:
    """The batch with all its items so marked."""
    return replace(batch, items=tuple(map(of_any_age, batch.items)))


class GivesBatches(Protocol):
    """The least that a batch source has: `as_source` makes a `BatchSource` of it."""

    async def next_batch(self) -> SAWBatch: ...


class BatchSource(ABC):
    """Where macro-batches come from: items with their credit.

    Only `next_batch` must be written; the defaults are those of a source that has no state, keeps
    no record and does not work ahead. A source does not apply the algorithm's preprocess: the
    trainer does, to every batch.
    """

    algorithm: RLAlgorithm | None = None
    """Assigns the credit; None if the source needs none."""

    works_ahead: bool = False
    """Whether the source makes the next batch while the trainer trains on this one: `WorksAhead`
    says what the trainer then promises."""

    @abstractmethod
    async def next_batch(self) -> SAWBatch:
        """The next macro-batch. Raises `StopAsyncIteration` when there are no more."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint saves of the source, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken."""
        return

    async def flush_record(self) -> None:
        """Returns when what was written down so far is on disk. The trainer awaits it before it
        saves a checkpoint, so that no checkpoint has steps that the record lacks."""
        return

    def committed(self, state: Mapping[str, Any]) -> None:
        """Hears that what `state` has consumed can never come again: a complete checkpoint has the
        state. Called in the thread that wrote the checkpoint, in the order of the checkpoints."""
        return

    def start_ahead(self) -> None:
        """Starts the batch that the next call of `next_batch` returns."""
        return

    async def settle(self) -> None:
        """Returns once no batch is in progress; `next_batch` raises its error, if any."""
        return

    async def drop_ahead(self) -> None:
        """Cancels and forgets the batch that was started."""
        return


class WorksAhead(BatchSource):
    """A batch source that makes the next batch while the trainer trains on this one.

    The trainer promises three things. It calls `start_ahead` only if it will train on another
    batch. It awaits `settle` before it changes weights that a sampler shares, and before an update
    ends. And a checkpoint has every part's state from before `start_ahead`, so that a resumed run
    makes that batch again.
    """

    works_ahead = True


class WrappedSource(BatchSource):
    """A source around another one. It has the other's algorithm and record, and the other's state
    as `source` in its own."""

    def __init__(self, source: GivesBatches) -> None:
        self.source = as_source(source)
        self.algorithm = self.source.algorithm

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
    and is one version behind when it is trained on. The state is that of the source, without more.
    """

    def __init__(self, source: GivesBatches) -> None:
        super().__init__(source)
        self._ahead: asyncio.Task[SAWBatch] | None = None

    async def next_batch(self) -> SAWBatch:
        """The batch that was started, or a new one."""
        task, self._ahead = self._ahead, None
        return await (self.source.next_batch() if task is None else task)

    def start_ahead(self) -> None:
        """Starts the next batch as a task of the running event loop."""
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self.source.next_batch())

    async def settle(self) -> None:
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def drop_ahead(self) -> None:
        task, self._ahead = self._ahead, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def state_dict(self) -> Mapping[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)

    def committed(self, state: Mapping[str, Any]) -> None:
        self.source.committed(state)


def as_source(source: GivesBatches) -> BatchSource:
    """The source itself; any other object with `next_batch` gets the defaults for what it lacks."""
    return source if isinstance(source, BatchSource) else _Completed(source)


class _Completed(BatchSource):
    """An object with `next_batch` as a batch source: its own methods go before the defaults."""

    def __init__(self, source: GivesBatches) -> None:
        self.source = source
        self.works_ahead = hasattr(source, "start_ahead")
        for name in vars(BatchSource):
            if not name.startswith("_") and hasattr(source, name):
                setattr(self, name, getattr(source, name))

    async def next_batch(self) -> SAWBatch:
        return await self.source.next_batch()
