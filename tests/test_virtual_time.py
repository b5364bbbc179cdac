"""The clock that tests of deadlines use."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.virtual_time import virtual_time


async def test_a_deadline_passes_at_once_when_nothing_else_can_happen() -> None:
    began = time.monotonic()
    with virtual_time():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        assert asyncio.get_running_loop().time() - began >= 3600
    assert time.monotonic() - began < 3600


async def test_a_deadline_does_not_pass_while_a_thread_works() -> None:
    with virtual_time():
        async with asyncio.timeout(0.001):
            await asyncio.to_thread(time.sleep, 0.2)


async def test_timers_keep_their_order() -> None:
    order: list[int] = []

    async def wait(seconds: int) -> None:
        await asyncio.sleep(seconds)
        order.append(seconds)

    with virtual_time():
        await asyncio.gather(*(wait(seconds) for seconds in (300, 100, 200)))
    assert order == [100, 200, 300]
