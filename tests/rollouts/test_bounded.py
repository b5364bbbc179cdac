"""Bounded concurrency: how many run at once, who waits for whom, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from ludic.rollouts.engine import run_bounded


async def test_every_result_comes_and_only_so_many_jobs_run_at_once() -> None:
    running, most = 0, 0

    async def run(job: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return job

    assert sorted([result async for result in run_bounded(range(20), run, 3)]) == list(range(20))
    assert most == 3


async def test_results_come_in_the_order_in_which_jobs_end() -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def run(job: int) -> int:
        await gates[job].wait()
        return job

    found: list[int] = []
    async with aclosing(run_bounded(range(3), run, 3)) as results:
        for job in (2, 0, 1):
            gates[job].set()
            found.append(await anext(results))
    assert found == [2, 0, 1]


async def test_no_jobs_give_no_results() -> None:
    async def run(job: int) -> int:
        return job

    assert [result async for result in run_bounded([], run, 4)] == []


async def test_a_slow_consumer_holds_jobs_back_and_still_gets_all() -> None:
    begun = 0

    async def run(job: int) -> int:
        nonlocal begun
        begun += 1
        return job

    found: list[int] = []
    async with aclosing(run_bounded(range(50), run, 4)) as results:
        async for result in results:
            found.append(result)
            for _ in range(20):
                await asyncio.sleep(0)
            # Those that wait here, and one that each worker had begun before it saw them.
            assert begun <= len(found) + 2 * 4
    assert sorted(found) == list(range(50))


async def test_the_first_exception_is_raised_and_ends_the_others() -> None:
    cancelled: list[int] = []

    async def run(job: int) -> int:
        if job == 2:
            raise ValueError("job 2")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(job)
            raise
        return job

    with pytest.raises(ValueError, match="job 2"):
        [result async for result in run_bounded(range(5), run, 3)]
    assert cancelled == [0, 1]


async def test_closing_it_cancels_what_runs_and_draws_no_more_jobs() -> None:
    drawn: list[int] = []

    def jobs() -> Iterator[int]:
        for job in range(10):
            drawn.append(job)
            yield job

    async def run(job: int) -> int:
        if job:
            await asyncio.Event().wait()
        return job

    async with aclosing(run_bounded(jobs(), run, 2)) as results:
        assert await anext(results) == 0
    assert drawn == [0, 1, 2]
    assert len(asyncio.all_tasks()) == 1
