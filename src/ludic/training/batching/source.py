"""The contract of batch sources, and how a batch gets into the trainer. Imports no torch."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from ludic.errors import BatchError, LudicError
from ludic.saw.batch import LOST_MEMBER, drop_overlong_episodes, longest
from ludic.saw.codec import batch_from_dict, batch_to_dict
from ludic.saw.items import SAWBatch, SAWItem
from ludic.saw.statistics import item_statistics
from ludic.training.algorithm import RLAlgorithm
from ludic.workers.deadlines import bounded

if TYPE_CHECKING:
    from torch import nn

    from ludic.sharding.world import World
    from ludic.training.config import TrainerConfig

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


Published = Callable[[], Awaitable[None]]
"""Returns when the samplers have the trainer's policy."""


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

    waits_for_publish: bool = True
    """Whether a batch is begun only when the trainer's policy is published. False: its samples are
    stored, or it says itself which policy each request needs."""

    def changes(self, model: nn.Module) -> bool:
        """Whether `model` itself, or its base, scores a batch while it is made: then nobody may
        train it meanwhile."""
        return False

    def refers_to(self, model: nn.Module) -> bool:
        """Whether the reference of a batch is `model` as it is then: a first update on the batch
        is at no distance from it."""
        return False

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


_MAX_EMPTY_BATCHES = 8
_log = logging.getLogger("ludic.training")


class BatchesEnded(StopAsyncIteration):
    """The batch source has no more batches. Only its own `next_batch` can say so: any other
    `StopAsyncIteration` is an iterator that ran out unnoticed in somebody's code."""


class PolicyLostError(LudicError):
    """What a source's `next_batch` raises when no sampler has the policy any more: the trainer
    publishes it again, and asks for the batch again."""


_RAISED: Mapping[str, type[Exception]] = {
    "ended": BatchesEnded,
    "lost": PolicyLostError,
    "error": BatchError,
}
"""What all ranks raise where rank 0 has no batch, each with the name under which it is told."""


@dataclass(eq=False)
class Intake:
    """Takes batches for all ranks. `run` calls a function in the trainer's thread, the only one in
    which ranks talk to each other. A source that gives nothing for `cfg.batch_timeout_s` is an
    error, which calls it `name`; so is a sample more than `cfg.max_lag` versions old. A source that
    `waits_for_publish` is asked when `published` returns."""

    algo: RLAlgorithm
    world: World
    run: Callable[..., Awaitable[Any]]
    name: str
    cfg: TrainerConfig
    published: Published
    _warned: bool = field(default=False, init=False)

    async def next_batch(self, source: BatchSource | None, version: int) -> SAWBatch:
        """Rank 0's next batch, on every rank, for the policy of `version`; only rank 0 has a
        `source`. Raises `BatchesEnded` when that has no more, and `PolicyLostError`, each on every
        rank."""
        if self.world.size == 1:
            return await self._from(source, version)
        batch, error, told = None, None, dict[str, Any]()
        if self.world.leads:
            try:
                batch = await self._from(source, version)
                told = dict(batch_to_dict(batch))
            except Exception as exc:  # the others wait to be told, whatever went wrong
                names = (name for name, kind in _RAISED.items() if isinstance(exc, kind))
                error, told = exc, {next(names, "error"): f"rank 0 has no batch: {exc!r}"}
        shared = await self.run(self.world.share, told)
        if error is not None:
            raise error
        for name, kind in _RAISED.items():
            if name in shared:
                raise kind(shared[name])
        return batch or batch_from_dict(shared)

    async def _from(self, source: BatchSource | None, version: int) -> SAWBatch:
        """The source's next batch after the algorithm's preprocess, which is applied only here. If
        nothing is left of a batch, the next one is taken, and the drops of all are counted."""
        assert source is not None
        if source.waits_for_publish:
            await self.published()
        dropped, limit = Counter[str](), self.cfg.batch_timeout_s
        for _ in range(_MAX_EMPTY_BATCHES):
            try:
                batch = await bounded(source.next_batch(), "a batch", self.name, limit)
            except StopAsyncIteration as exc:
                raise BatchesEnded(*exc.args) from exc
            check_lag(batch, version, self.cfg.max_lag)
            batch = self.algo.prepare(self._without_overlong(batch))
            dropped += Counter(batch.meta.get("dropped", {}))
            if batch.items:
                return replace(batch, meta={**batch.meta, "dropped": dict(dropped)})
        hint = (
            f"Raise max_seq_len={self.cfg.max_seq_len}, or shorten what agents are shown"
            if dropped["overlong"]
            else "Look at why rewards do not vary"
        )
        raise BatchError(
            f"{_MAX_EMPTY_BATCHES} batches in a row had nothing to train on after the preprocess "
            f"of {self.algo.name!r}; dropped, in turns: {dict(dropped)}. {hint}"
        )

    def _without_overlong(self, batch: SAWBatch) -> SAWBatch:
        """The batch without episodes that are too long to train on, before they count anywhere.
        The first time warns; after that only the metric `train/overlong_episodes` shows it."""
        trainable = drop_overlong_episodes(batch, self.cfg.max_seq_len)
        episodes = trainable.meta.get("overlong_episodes", 0)
        if episodes and not self._warned:
            self._warned = True
            _log.warning(
                "%d episodes of a batch have a sample over max_seq_len=%d (the longest: %d tokens) "
                "and are not trained on, nor is what lost_member=%r drops with them; "
                "train/overlong_episodes counts them. Raise max_seq_len, or shorten what agents are"
                " shown (max_tool_chars, inference.max_context_tokens)",
                *(episodes, self.cfg.max_seq_len, longest(batch), batch.meta[LOST_MEMBER]),
            )
        return trainable


def lag_of(items: Sequence[SAWItem], version: int) -> int:
    """How many versions the items' oldest token is behind `version`. A newer one, of a trainer that
    was lost, counts as not behind at all, and so does one whose version was not recorded."""
    oldest: int = item_statistics(items).get("version_min", version)
    return max(version - oldest, 0)


def check_lag(batch: SAWBatch, version: int, max_lag: int | None) -> None:
    """Raises `BatchError` if a token is more than `max_lag` versions behind `version`."""
    items = [item for item in batch.items if not item.meta.get(ANY_AGE)]
    if max_lag is None or lag_of(items, version) <= max_lag:
        return
    lags = [(lag_of([item], version), item.rollout_id) for item in items]
    late = [lag for lag in lags if lag[0] > max_lag]
    lag, rollout_id = max(late, key=lambda entry: entry[0])
    raise BatchError(
        f"rollout {rollout_id!r} has tokens of policy version {version - lag}, and version "
        f"{version} would be trained on them: {lag} versions old, over max_lag={max_lag} (so are "
        f"{len(late)} of the batch's {len(batch.items)} samples). Let the source work less far "
        "ahead, give the trainer the publisher that tells the sampler of each version, or raise "
        "max_lag; TrainerConfig(max_lag=None) sets no bound"
    )
