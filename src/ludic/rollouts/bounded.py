"""Bounded concurrency: many jobs, a few at a time, results as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

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
    done: asyncio.Queue[tuple[Result] | Exception | None] = asyncio.Queue(concurrency)

    async def work() -> None:
        try:
            for job in pending:
                await done.put((await run(job),))
        except Exception as exc:
            await done.put(exc)
        else:
            await done.put(None)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        left = len(workers)
        while left:
            result = await done.get()
            if result is None:
                left -= 1
            elif isinstance(result, Exception):
                raise result
            else:
                yield result[0]
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers, timeout=_STOP_S)
