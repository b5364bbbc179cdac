"""The way of a batch into the trainer: from rank 0's source, prepared once, to every rank."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ludic.errors import BatchError
from ludic.saw.codec import batch_from_dict, batch_to_dict
from ludic.saw.items import SAWBatch
from ludic.saw.overlong import LOST_MEMBER, drop_overlong_episodes, longest
from ludic.sharding.world import World
from ludic.training.algorithm import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.types import BatchSource
from ludic.workers.deadlines import bounded

_MAX_EMPTY_BATCHES = 8
_log = logging.getLogger("ludic.training")


class Intake:
    """Takes batches for all ranks. `run` calls a function in the trainer's thread, the only one in
    which ranks talk to each other. A source that gives nothing for `cfg.batch_timeout_s` is an
    error, which calls it `name`."""

    def __init__(
        self,
        algo: RLAlgorithm,
        world: World,
        run: Callable[..., Awaitable[Any]],
        name: str,
        cfg: TrainerConfig,
    ) -> None:
        self.algo, self.world, self.max_seq_len = algo, world, cfg.max_seq_len
        self._warned = False
        self._run, self._name, self._timeout_s = run, name, cfg.batch_timeout_s

    async def next_batch(self, source: BatchSource | None) -> SAWBatch:
        """Rank 0's next batch, on every rank; only rank 0 has a `source`."""
        if self.world.size == 1:
            return await self._from(source)
        batch, error, told = None, None, dict[str, Any]()
        if self.world.leads:
            try:
                batch = await self._from(source)
                told = dict(batch_to_dict(batch))
            except Exception as exc:  # the others wait to be told, whatever went wrong
                ended = isinstance(exc, StopAsyncIteration)
                error, told = exc, {"ended": str(exc)} if ended else {"error": repr(exc)}
        shared = await self._run(self.world.share, told)
        if error is not None:
            raise error
        if "ended" in shared:
            raise StopAsyncIteration(shared["ended"])
        if "error" in shared:
            raise BatchError(f"rank 0 has no batch: {shared['error']}")
        return batch or batch_from_dict(shared)

    async def _from(self, source: BatchSource | None) -> SAWBatch:
        """The source's next batch after the algorithm's preprocess, which is applied only here. If
        nothing is left of a batch, the next one is taken, and the drops of all are counted."""
        assert source is not None
        dropped: Counter[str] = Counter()
        for _ in range(_MAX_EMPTY_BATCHES):
            batch = await bounded(source.next_batch(), "a batch", self._name, self._timeout_s)
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
        kept = drop_overlong_episodes(batch, self.max_seq_len)
        episodes = kept.meta.get("overlong_episodes", 0)
        if episodes and not self._warned:
            self._warned = True
            _log.warning(
                "%d episodes of a batch have a sample over max_seq_len=%d (the longest: %d tokens) "
                "and are not trained on, nor is what lost_member=%r drops with them; "
                "train/overlong_episodes counts them. Raise max_seq_len, or shorten what agents are"
                " shown (max_tool_chars, inference.max_context_tokens)",
                *(episodes, self.max_seq_len, longest(batch), batch.meta[LOST_MEMBER]),
            )
        return kept
