"""Bounded concurrency: many jobs, a few at a time, results as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from ludic.errors import RolloutError
from ludic.workers.escapes import contained

Job = TypeVar("Job")
Result = TypeVar("Result")

_STOP_S = 30.0
"""How long cancelled jobs may take to clean up before they are left behind."""


async def run_bounded(
    jobs: Iterable[Job], run: Callable[[Job], Awaitable[Result]], concurrency: int
) -> AsyncGenerator[Result, None]:
    """Runs `run(job)` for every job, at most `concurrency` at a time, and yields each result as it
    comes. Jobs are drawn one by one, when there is room for them.

    The first exception ends everything: what is running is cancelled, and it is raised. The same
    happens without an exception when the generator is closed. A slow consumer holds jobs back.
    """
    pending = iter(jobs)
    done: deque[tuple[Result] | Exception] = deque()
    news, room = asyncio.Event(), asyncio.Event()
    working = concurrency

    async def work() -> None:
        nonlocal working
        try:
            for job in pending:
                # An error that ends only this worker would lose its jobs without a word.
                with contained(RolloutError, "a job"):
                    done.append((await run(job),))
                news.set()
                while len(done) >= concurrency:
                    room.clear()
                    await room.wait()
        except Exception as exc:
            done.append(exc)
        finally:
            working -= 1
            news.set()

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        while working or done:
            if not done:
                news.clear()
                await news.wait()
                continue
            result = done.popleft()
            if len(done) < concurrency:
                room.set()
            if isinstance(result, Exception):
                raise result
            yield result[0]
    finally:
        if still := [worker for worker in workers if not worker.done()]:
            for worker in still:
                worker.cancel()
            await asyncio.wait(still, timeout=_STOP_S)
