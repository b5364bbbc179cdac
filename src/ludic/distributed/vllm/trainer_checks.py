"""What the trainer finds out about its own weights while the servers take them in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ludic.distributed.vllm.checksums import receipt, refuse_not_finite
from ludic.distributed.vllm.timing import PublishTimes


class TrainerChecks:
    """Looks for NaN, computes checksums, then the canary's scores, in that order.

    It runs in a thread beside the servers' staging. That is safe since nobody writes meanwhile: the
    trainer steps only when its publish has ended, the servers read a copy or the same tensors, and
    nothing is applied before `done` has ended well.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        scores: Callable[[], list[float]] | None,
        times: PublishTimes,
    ) -> None:
        self._tensors, self._score, self._times = tensors, scores, times
        self._wanted = True
        self.scores: list[float] | None = None
        self._expected = asyncio.create_task(asyncio.to_thread(self._expect))
        self._all = asyncio.create_task(self._run())

    # A thread cannot be cancelled: the tasks are shielded, so that `stop` can wait for their end.

    async def expected(self) -> dict[str, list[Any]]:
        """What a server's receipt has to say."""
        return await asyncio.shield(self._expected)

    async def done(self) -> None:
        """Returns when everything is known; raises what was wrong."""
        await asyncio.shield(self._all)

    async def stop(self, seconds: float) -> None:
        """Begins nothing more, and waits for what is under way, at most so long: the trainer may
        change its weights afterwards."""
        self._wanted = False
        for work in (self._expected, self._all):
            # `done` has raised its error already, or nobody asked.
            work.add_done_callback(lambda work: work.cancelled() or work.exception())
        await asyncio.wait({self._all}, timeout=seconds)

    async def _run(self) -> None:
        await self._expected
        if self._wanted and self._score is not None:
            with self._times.timed("own_canary"):
                self.scores = await asyncio.to_thread(self._score)

    def _expect(self) -> dict[str, list[Any]]:
        self._look_for_nan()
        return self._compute_expected() if self._wanted else {}

    def _look_for_nan(self) -> None:
        with self._times.timed("finite"):
            refuse_not_finite(self._tensors)

    def _compute_expected(self) -> dict[str, list[Any]]:
        with self._times.timed("checksums"):
            return receipt(self._tensors.items())
