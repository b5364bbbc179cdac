"""Waiting for async work from a script, and from a notebook's cell, which may be interrupted."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ludic.runs.interruption import blocking


async def answer() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fail() -> None:
    raise KeyError("why")


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """As in a notebook's kernel: asyncio's own handler would cancel the test instead."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_this_test() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_a_script_waits_in_its_own_thread() -> None:
    assert blocking(answer) == threading.current_thread().name
    with pytest.raises(KeyError, match="why"):
        blocking(fail)


async def test_where_a_loop_is_running_the_work_has_another_thread() -> None:
    assert blocking(answer).startswith("ludic-run")
    with pytest.raises(KeyError, match="why"):
        blocking(fail)


async def test_an_interrupted_cell_asks_the_work_to_stop_and_waits_for_it() -> None:
    stopping = threading.Event()

    async def work() -> str:
        interrupt_this_test()
        await asyncio.to_thread(stopping.wait, 60)
        return "stopped"

    with raised_interrupts():
        assert blocking(work, on_interrupt=stopping.set) == "stopped"


async def test_work_that_cannot_be_asked_is_left_with_the_interrupt() -> None:
    done = threading.Event()

    async def work() -> None:
        interrupt_this_test()
        await asyncio.to_thread(done.wait, 60)

    with raised_interrupts(), pytest.raises(KeyboardInterrupt):
        blocking(work)
    done.set()
