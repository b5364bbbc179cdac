"""The way of a batch into the trainer: from rank 0's source, prepared once, to every rank."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from ludic.errors import BatchError
from ludic.saw.building import UNKNOWN_VERSION
from ludic.saw.codec import batch_from_dict, batch_to_dict
from ludic.saw.items import SAWBatch, SAWItem
from ludic.saw.overlong import LOST_MEMBER, drop_overlong_episodes, longest
from ludic.sharding.world import World
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.source import ANY_AGE, BatchSource
from ludic.training.config import TrainerConfig
from ludic.workers.deadlines import bounded

_MAX_EMPTY_BATCHES = 8
_log = logging.getLogger("ludic.training")


class BatchesEnded(StopAsyncIteration):
    """The batch source has no more batches. Only its own `next_batch` can say so: any other
    `StopAsyncIteration` is an iterator that ran out unnoticed in somebody's code."""


class Intake:
    """Takes batches for all ranks. `run` calls a function in the trainer's thread, the only one in
    which ranks talk to each other. A source that gives nothing for `cfg.batch_timeout_s` is an
    error, which calls it `name`; so is a sample more than `cfg.max_lag` versions old."""

    def __init__(
        self,
        algo: RLAlgorithm,
        world: World,
        run: Callable[..., Awaitable[Any]],
        name: str,
        cfg: TrainerConfig,
    ) -> None:
        self.algo, self.world = algo, world
        self.max_seq_len, self.max_lag = cfg.max_seq_len, cfg.max_lag
        self._warned = False
        self._run, self._name, self._timeout_s = run, name, cfg.batch_timeout_s

    async def next_batch(self, source: BatchSource | None, version: int) -> SAWBatch:
        """Rank 0's next batch, on every rank, for the policy of `version`; only rank 0 has a
        `source`. Raises `BatchesEnded` when that has no more."""
        if self.world.size == 1:
            return await self._from(source, version)
        batch, error, told = None, None, dict[str, Any]()
        if self.world.leads:
            try:
                batch = await self._from(source, version)
                told = dict(batch_to_dict(batch))
            except Exception as exc:  # the others wait to be told, whatever went wrong
                ended = isinstance(exc, BatchesEnded)
                error, told = exc, {"ended": str(exc)} if ended else {"error": repr(exc)}
        shared = await self._run(self.world.share, told)
        if error is not None:
            raise error
        if "ended" in shared:
            raise BatchesEnded(shared["ended"])
        if "error" in shared:
            raise BatchError(f"rank 0 has no batch: {shared['error']}")
        return batch or batch_from_dict(shared)

    async def _from(self, source: BatchSource | None, version: int) -> SAWBatch:
        """The source's next batch after the algorithm's preprocess, which is applied only here. If
        nothing is left of a batch, the next one is taken, and the drops of all are counted."""
        assert source is not None
        dropped: Counter[str] = Counter()
        for _ in range(_MAX_EMPTY_BATCHES):
            try:
                batch = await bounded(source.next_batch(), "a batch", self._name, self._timeout_s)
            except StopAsyncIteration as exc:
                raise BatchesEnded(*exc.args) from exc
            check_lag(batch, version, self.max_lag)
            batch = self.algo.prepare(self._without_overlong(batch))
            dropped += Counter(batch.meta.get("dropped", {}))
            if batch.items:
                return replace(batch, meta={**batch.meta, "dropped": dict(dropped)})
        hint = (
            f"Raise max_seq_len={self.max_seq_len}, or shorten what agents are shown"
            if dropped["overlong"]
            else "Look at why rewards do not vary"
        )
        raise BatchError(
            f"{_MAX_EMPTY_BATCHES} batches in a row had nothing to train on after the preprocess "
            f"of {self.algo.name!r}; dropped, in turns: {dict(dropped)}. {hint}"
        )

    def _without_overlong(self, batch: SAWBatch) -> SAWBatch:
        """The batch without episodes that are too long to train on, before they count anywhere.
        The first time it is said; after that the log's `train/overlong_episodes` says it."""
        trainable = drop_overlong_episodes(batch, self.max_seq_len)
        episodes = trainable.meta.get("overlong_episodes", 0)
        if episodes and not self._warned:
            self._warned = True
            _log.warning(
                "%d episodes of a batch have a sample over max_seq_len=%d (the longest: %d tokens) "
                "and are not trained on, nor is what lost_member=%r drops with them; "
                "train/overlong_episodes counts them. Raise max_seq_len, or shorten what agents are"
                " shown (max_tool_chars, inference.max_context_tokens)",
                *(episodes, self.max_seq_len, longest(batch), batch.meta[LOST_MEMBER]),
            )
        return trainable


def lag_of(item: SAWItem, version: int) -> int:
    """How many versions the item's oldest token is behind `version`. A newer one, of a trainer that
    was lost, counts as not behind at all, and so does one whose version was not recorded."""
    versions = item.attachments.versions
    if versions is None or not versions.size:
        return 0
    oldest = int(versions.min())
    if oldest == UNKNOWN_VERSION:
        recorded = versions[versions != UNKNOWN_VERSION]
        oldest = int(recorded.min()) if recorded.size else version
    return max(version - oldest, 0)


def check_lag(batch: SAWBatch, version: int, max_lag: int | None) -> None:
    """Raises `BatchError` if a token is more than `max_lag` versions behind `version`."""
    if max_lag is None:
        return
    lags = [(lag_of(i, version), i.rollout_id) for i in batch.items if not i.meta.get(ANY_AGE)]
    late = [lag for lag in lags if lag[0] > max_lag]
    if not late:
        return
    lag, rollout_id = max(late, key=lambda entry: entry[0])
    raise BatchError(
        f"rollout {rollout_id!r} has tokens of policy version {version - lag}, and version "
        f"{version} would be trained on them: {lag} versions old, over max_lag={max_lag} (so are "
        f"{len(late)} of the batch's {len(batch.items)} samples). Let the source work less far "
        "ahead, give the trainer the publisher that tells the sampler of each version, or raise "
        "max_lag; TrainerConfig(max_lag=None) sets no bound"
    )
