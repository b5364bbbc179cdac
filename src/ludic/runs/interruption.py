"""Waiting for a run, and Ctrl-C: the first one stops it cleanly, the second ends the process. And
what the garbage collector is spared meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

NOTICE = b"\nstopping after this step, with a checkpoint; press Ctrl-C again to end at once\n"


@contextmanager
def interruptible(stop: Callable[[], None], notice: bytes = NOTICE) -> Iterator[None]:
    """The first Ctrl-C says so and calls `stop` in the event loop; the second ends the process.

    The first one restores the signal's default action, so that the second needs neither the event
    loop nor the interpreter: an environment may be blocking either.
    """
    loop = asyncio.get_running_loop()

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, notice)  # print is not reentrant, and may be what was interrupted
        loop.call_soon_threadsafe(stop)

    with handling(on_interrupt, signal.SIGINT):
        yield


@contextmanager
def handling(handler: Callable[..., None], *signs: signal.Signals) -> Iterator[None]:
    """Has `handler` called for these signals, and whoever heard them before for later ones. Does
    nothing in another thread than the main one, which alone hears of signals."""
    try:
        before = {sign: signal.signal(sign, handler) for sign in signs}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for sign, earlier in before.items():
            signal.signal(sign, earlier)


def blocking(
    work: Callable[[], Coroutine[Any, Any, T]], *, on_interrupt: Callable[[], None] | None = None
) -> T:
    """Runs `work()` to its end and returns what it returns.

    Where this thread has a running event loop, as in a notebook, the work gets a thread and a loop
    of its own. There, an interrupt calls `on_interrupt` (from this thread) and goes on waiting; a
    second one is raised.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    # The work waits for its turn until an interrupt of this thread would be noticed below.
    turn: SimpleQueue[bool] = SimpleQueue()

    def in_turn() -> T:
        if not turn.get():
            raise asyncio.CancelledError
        return asyncio.run(work())

    pool = ThreadPoolExecutor(1, thread_name_prefix="ludic-run")
    try:
        future = pool.submit(contextvars.copy_context().run, in_turn)
        try:
            turn.put(True)
            return _result(future)
        except KeyboardInterrupt:
            if on_interrupt is None or future.done():
                raise
            on_interrupt()
            return _result(future)
    finally:
        turn.put(False)
        pool.shutdown(wait=False)


def _result(future: Future[T]) -> T:
    """Waits in short stretches: an interrupt that comes as a wait begins is noticed only at the
    wait's end."""
    while not future.done():
        wait([future], timeout=0.5)
    return future.result()


YOUNG = 200_000
"""So many more objects made than freed before the young ones are looked through. A batch of many
episodes holds fewer, and looking through them while it is made frees nothing. Python's own
figure is 700."""


@contextmanager
def rare_collections(every_s: float = 60.0) -> Iterator[None]:
    """Spares the garbage collector what it need not look at again.

    Most of a process's objects are modules and what the libraries made of themselves: hundreds of
    thousands, which a full collection walks through in a tenth of a second and never frees. Those
    that are there now are left out while this is held. Episodes leave few cycles behind, so the
    young ones are looked at less often, too; but all of them every `every_s`, since one that a
    user's environment leaves may hold a lot of memory.
    """
    thresholds, over = gc.get_threshold(), threading.Event()

    def collect() -> None:
        while not over.wait(every_s):
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *thresholds[1:])
    threading.Thread(target=collect, name="collector", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        gc.set_threshold(*thresholds)
        gc.unfreeze()
