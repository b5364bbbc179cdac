"""Deadlines that share one timer of their event loop."""

from __future__ import annotations

import asyncio

import pytest

from ludic.workers.deadlines import deadline
from tests.virtual_time import virtual_time


async def test_the_earliest_of_many_deadlines_passes_first_and_only_in_its_own_task() -> None:
    passed: list[int] = []

    async def wait(seconds: int) -> None:
        try:
            with deadline(seconds):
                await asyncio.sleep(100)
        except TimeoutError:
            passed.append(seconds)

    with virtual_time():
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*map(wait, (30, 10, 40, 20, 200)))
        assert passed == [10, 20, 30, 40]
        assert asyncio.get_running_loop().time() - start == pytest.approx(100)


async def test_only_the_deadline_that_passed_says_so() -> None:
    with virtual_time(), deadline(50) as outer:
        with pytest.raises(TimeoutError), deadline(5) as inner:
            await asyncio.sleep(10)
        assert inner.expired
        await asyncio.sleep(1)
    assert not outer.expired


async def test_an_outer_deadline_passes_through_an_inner_one() -> None:
    with (
        virtual_time(),
        pytest.raises(TimeoutError),
        deadline(5) as outer,
        deadline(50) as inner,
    ):
        await asyncio.sleep(100)
    assert outer.expired
    assert not inner.expired


async def test_cancellation_from_outside_is_no_timeout() -> None:
    async def work() -> None:
        with deadline(60):
            await asyncio.sleep(100)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_without_a_limit_and_a_result_in_time_raise_nothing() -> None:
    with deadline(None) as none, deadline(60) as some:
        await asyncio.sleep(0)
    assert not none.expired
    assert not some.expired


async def test_a_deadline_that_has_passed_already_cancels_at_the_next_wait() -> None:
    with pytest.raises(TimeoutError), deadline(0.0):
        await asyncio.sleep(100)


async def test_no_timer_is_left_when_the_last_deadline_is_over() -> None:
    loop = asyncio.get_running_loop()
    with deadline(600):
        await asyncio.sleep(0)
    assert not [t for t in loop._scheduled if not t.cancelled()]  # type: ignore[attr-defined]


def test_every_event_loop_has_its_own_timer() -> None:
    async def late() -> None:
        with deadline(0.01):
            await asyncio.sleep(100)

    for _ in range(2):
        with pytest.raises(TimeoutError):
            asyncio.run(late())


def test_outside_of_an_event_loop_a_deadline_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"), deadline(1.0):
        pass
