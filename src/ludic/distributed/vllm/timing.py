"""How long each part of a publish took, and running its parts side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ORDER = (
    *("gather", "prepare", "greet", "finite", "checksums", "own_canary", "join"),
    *("write", "room", "load", "start", "stage", "compare", "sample"),
    *("pause", "apply", "reset", "resume", "canary"),
    *("worker_stage", "worker_checksums", "worker_apply"),
)


class PublishTimes:
    """Seconds by the name of a stage. Stages may overlap, so they need not add up. Threads may time
    stages too, each its own ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds what its body takes, even when that raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def slowest(self, others: Iterable[Mapping[str, float]], prefix: str = "") -> None:
        """Takes over the stages of those who worked side by side: of each, the longest."""
        for seconds in others:
            for name, took in seconds.items():
                key = prefix + name
                self.seconds[key] = max(self.seconds.get(key, 0.0), took)

    def in_order(self) -> dict[str, float]:
        """The stages in the order in which they begin, those of the workers last."""
        places = {name: place for place, name in enumerate(ORDER)}
        return dict(sorted(self.seconds.items(), key=lambda s: places.get(s[0], len(ORDER))))


async def together(steps: Iterable[Coroutine[Any, Any, Any] | asyncio.Future[Any]]) -> None:
    """Runs the steps side by side; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
