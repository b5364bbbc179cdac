"""Deadlines for code that awaits: `asyncio.timeout` at a tenth of its price.

An episode has several deadlines at any moment, and hardly any of them ever comes. `asyncio` sets
and cancels a timer for each. Here the deadlines of one event loop share one timer, set for the
earliest of them: whoever comes with a later one only adds itself to a set, and leaves it again.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable
from types import TracebackType
from typing import TypeVar

from ludic.errors import DeadlineError

T = TypeVar("T")


class deadline:
    """`with deadline(seconds) as limit:` cancels the task inside when the time is over, and raises
    `TimeoutError` in its place; `limit.expired` then says whose deadline it was. None: no limit.
    """

    __slots__ = ("_cancelling", "_seconds", "_task", "_watch", "expired", "when")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._watch: _Watch | None = None
        self.expired = False

    def __enter__(self) -> deadline:
        if self._seconds is None:
            return self
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline is for code inside a task")
        self._task = task
        self._cancelling = task.cancelling()
        loop = task.get_loop()
        self.when = loop.time() + self._seconds
        self._watch = watch = _watch_of(loop)
        watch.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watch is None:
            return
        if not self.expired:
            self._watch.leave(self)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """Called by the watch, in the loop's thread."""
        self.expired = True
        self._task.cancel()


async def bounded(work: Awaitable[T], what: str, whom: str, seconds: float) -> T:
    """Awaits `work`; after `seconds` cancels it and raises a `DeadlineError` that says what was
    waited for, and on whom."""
    try:
        return await asyncio.wait_for(work, seconds)
    except DeadlineError:
        raise
    except TimeoutError as exc:
        raise DeadlineError(what, whom, seconds) from exc


class _Watch:
    """The deadlines of one event loop; only its thread comes here."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self._open: set[deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    def add(self, limit: deadline) -> None:
        self._open.add(limit)
        if limit.when < self._timer_at:
            self._set(limit.when)

    def leave(self, limit: deadline) -> None:
        self._open.discard(limit)
        if not self._open:  # no timer outlives the last deadline
            self._set(float("inf"))

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        loop = self.loop()
        if loop is None or when == float("inf"):
            self._timer = None
        else:
            self._timer = loop.call_at(when, self._look)

    def _look(self) -> None:
        # The loop's clock has a resolution: it may call a hair early.
        due = [limit for limit in self._open if limit.when <= self._timer_at]
        self._timer = None
        self._open.difference_update(due)
        self._set(min((limit.when for limit in self._open), default=float("inf")))
        for limit in due:
            limit.expire()


class _Here(threading.local):
    watch: _Watch | None = None


_here = _Here()


def _watch_of(loop: asyncio.AbstractEventLoop) -> _Watch:
    """The watch of the loop that runs in this thread."""
    watch = _here.watch
    if watch is None or watch.loop() is not loop:
        watch = _here.watch = _Watch(loop)
    return watch
