"""What the trainer finds out about its own weights, while the servers take them in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ludic.distributed.vllm.checksums import checksums, not_finite
from ludic.distributed.vllm.timing import Stages
from ludic.errors import PublishError


class TrainerChecks:
    """Looks for NaN, computes checksums, then the canary's scores, in a thread and in that order.

    `expected` is there as soon as the checksums are; `done` ends when all is, or raises what was
    wrong. Nothing may be applied before `done` has ended well.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        scores: Callable[[], list[float]] | None,
        stages: Stages,
    ) -> None:
        self._tensors, self._score, self._stages = tensors, scores, stages
        self._wanted = True
        self.scores: list[float] | None = None
        self.expected: asyncio.Future[dict[str, list[Any]]]
        self.expected = asyncio.get_running_loop().create_future()
        self._work = asyncio.create_task(self._run())

    async def done(self) -> None:
        """Returns when everything is known. To cancel it leaves the work going on."""
        await asyncio.shield(self._work)

    async def stop(self, seconds: float) -> None:
        """Begins nothing more and waits for what is under way, at most so long: the trainer may
        change its weights afterwards."""
        self._wanted = False
        self.expected.cancel()
        # What it raised was raised by `done` as well, or nobody asked.
        self._work.add_done_callback(lambda work: work.cancelled() or work.exception())
        await asyncio.wait({self._work}, timeout=seconds)

    async def _run(self) -> None:
        await asyncio.to_thread(self._look_for_nan)
        if self._wanted:
            expected = await asyncio.to_thread(self._compute_expected)
            if not self.expected.done():
                self.expected.set_result(expected)
        if self._wanted and self._score is not None:
            with self._stages.timed("own_canary"):
                self.scores = await asyncio.to_thread(self._score)

    def _look_for_nan(self) -> None:
        with self._stages.timed("finite"):
            broken = not_finite(self._tensors.items())
        if broken:
            raise PublishError(
                f"{len(broken)} tensors hold NaN or infinity, first {broken[0]}: they are not "
                "published, and the servers keep their weights. Lower the learning rate, or go "
                "back to a checkpoint"
            )

    def _compute_expected(self) -> dict[str, list[Any]]:
        with self._stages.timed("checksums"):
            sums = checksums(self._tensors.items())
        return {
            name: [str(sums[name]), str(tensor.dtype).split(".")[-1], list(tensor.shape)]
            for name, tensor in self._tensors.items()
        }
