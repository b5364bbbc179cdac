"""An event loop in a thread of its own, for what must outlive a call, or must not hold it up.

Connections belong to the loop that opened them, while episodes come from whatever loop is running
now; and code that blocks the loop it runs on should block none of ours. Such work is sent here.

Threads: `run` and `call` may be used from any thread and any loop. What is sent runs in the loop's
thread alone, so the work itself needs no locks. The thread is a daemon and starts with first use.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ludic.errors import DeadlineError

T = TypeVar("T")


class BackgroundLoop:
    """A named event loop that runs in the background until the process ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns, once it has run there. Cancelling this cancels the work."""
        return await asyncio.wrap_future(self._send(work))

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """The same for code that is not async. Past the deadline the work is cancelled."""
        future = self._send(work)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():  # the work's own
                raise
            future.cancel()
            raise DeadlineError(what, self.name, timeout_s) from error

    def _send(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name=f"ludic-{self.name}", daemon=True
                ).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)
