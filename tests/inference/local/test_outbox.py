"""Answers of one step cross to an event loop together."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest

from ludic.inference.local.engine_thread import Outbox


async def test_all_answers_of_a_step_wake_the_loop_once() -> None:
    loop, outbox = asyncio.get_running_loop(), Outbox()
    waiters: list[asyncio.Future[Any]] = [loop.create_future() for _ in range(4)]
    waiters[3].cancel()
    for waiter, answer in zip(waiters, (1, 2, ValueError("no"), 4), strict=True):
        outbox.put(waiter, answer)
    with mock.patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as call:
        outbox.hand_over()
        outbox.hand_over()
    assert call.call_count == 1
    assert await waiters[0] + await waiters[1] == 3
    with pytest.raises(ValueError, match="no"):
        await waiters[2]


def test_a_loop_that_is_closed_takes_no_answers_and_holds_nobody_up() -> None:
    loop, outbox = asyncio.new_event_loop(), Outbox()
    outbox.put(loop.create_future(), 1)
    loop.close()
    outbox.hand_over()
