"""Ctrl-C: the first one stops a run in order, the second one ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    pressed = False

    def on_interrupt() -> None:
        nonlocal pressed
        if pressed:
            os._exit(130)
        pressed = True
        stop()

    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except (NotImplementedError, RuntimeError):  # no signals in this thread or system
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
