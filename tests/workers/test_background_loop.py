from __future__ import annotations

import asyncio
import threading

import pytest

from ludic.errors import DeadlineError
from ludic.workers.threads import BackgroundLoop

LOOP = BackgroundLoop("test")


async def where() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def test_work_runs_in_the_loops_thread_from_whichever_loop_it_comes() -> None:
    assert await LOOP.run(where()) == "ludic-test"
    assert await asyncio.to_thread(asyncio.run, LOOP.run(where())) == "ludic-test"
    assert await asyncio.to_thread(LOOP.call, where(), timeout_s=60, what="it") == "ludic-test"


async def test_what_the_work_raises_is_raised_here() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await LOOP.run(fail())


async def test_cancelling_the_wait_cancels_the_work() -> None:
    begun, ended = asyncio.Event(), threading.Event()
    here = asyncio.get_running_loop()

    async def hang() -> None:
        here.call_soon_threadsafe(begun.set)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    waiting = asyncio.create_task(LOOP.run(hang()))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(ended.wait, 60)


async def test_a_call_past_its_deadline_says_what_was_waited_for() -> None:
    ended = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(DeadlineError, match=r"waited 0.05 s for the end of it from test"):
        await asyncio.to_thread(LOOP.call, hang(), timeout_s=0.05, what="the end of it")
    assert await asyncio.to_thread(ended.wait, 60)


async def test_a_timeout_of_the_work_itself_is_not_the_deadline() -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await asyncio.to_thread(LOOP.call, late(), timeout_s=60, what="it")
