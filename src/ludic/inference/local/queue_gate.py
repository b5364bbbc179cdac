"""Back-pressure: a bounded number of requests wait inside, the others wait to get in."""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class QueueGate:
    """Counts the places of a bounded queue. Entered from event loops, left from any thread.

    The lock guards the count and the line outside; nothing waits while it holds it. A place that is
    left goes straight to the first in line and is never free in between, so nobody overtakes. That
    one may have given up at the same moment: futures are settled in their own loop only, so either
    `_hand_over` finds it done and passes the place on, or `enter` is cancelled after it got the
    place and leaves it.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self._lock = threading.Lock()
        self._outside: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    def try_enter(self) -> bool:
        """Takes a place if one is free and nobody waits in line."""
        with self._lock:
            if self.taken >= self.places or self._outside:
                return False
            self.taken += 1
            return True

    async def enter(self) -> None:
        """Takes a place, in order of arrival; safe to cancel."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.taken < self.places and not self._outside:
                self.taken += 1
                return
            future: asyncio.Future[None] = loop.create_future()
            self._outside.append((loop, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Frees a place, or hands it to the next in line."""
        while True:
            with self._lock:
                if not self._outside:
                    self.taken -= 1
                    return
                loop, future = self._outside.popleft()
            try:
                loop.call_soon_threadsafe(self._hand_over, future)
                return
            except RuntimeError:  # that loop is closed: its request is gone
                continue

    def _hand_over(self, future: asyncio.Future[None]) -> None:
        if future.done():
            self.leave()
        else:
            future.set_result(None)
