"""Ctrl-C: the first one stops a run cleanly, the second one ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTICE = b"\nstopping after this step, with a checkpoint; press Ctrl-C again to end at once\n"


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop` in the event loop; the second ends the process.

    The first one restores the signal's default action, so that the second needs neither the event
    loop nor the interpreter: an environment may be blocking either.
    """
    loop = asyncio.get_running_loop()

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, NOTICE)  # print is not reentrant, and may be what was interrupted
        loop.call_soon_threadsafe(stop)

    try:
        before = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # only the main thread hears of signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
