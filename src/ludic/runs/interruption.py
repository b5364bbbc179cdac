"""Ctrl-C: the first one stops a run in order, the second one ends the process."""

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

    The first one gives the signal back its default action, so that the second needs neither the
    loop nor the interpreter, either of which an environment may hold for good.
    """
    loop = asyncio.get_running_loop()

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, NOTICE)  # whatever print was interrupted could not be entered again
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
