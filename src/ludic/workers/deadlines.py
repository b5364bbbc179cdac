"""Deadlines and ends for code that awaits: `asyncio.timeout` at a fifth of its price among many
episodes.

An episode has several deadlines at any moment, and hardly any of them ever comes. `asyncio` sets
and cancels a timer for each. Here the deadlines of one event loop share one timer, set for the
earliest of them: whoever comes with a later one only adds itself to a set, and leaves it again.
Alone in its loop, a deadline sets the timer itself and costs two thirds of `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable
from typing import Any, TypeVar

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
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a deadline is for code inside a task")
        self._task = task
        self._cancelling = task.cancelling()
        self.when = when = loop.time() + self._seconds
        watch = _here.watch
        if watch is None or watch.loop() is not loop:
            watch = _here.watch = _Watch(loop)
        self._watch = watch
        watch.open.add(self)
        if when < watch.timer_at:
            watch.set_timer(when)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        watch = self._watch
        if watch is None:
            return
        if not self.expired:
            watch.open.discard(self)
            if not watch.open:  # no timer outlives the last deadline
                watch.set_timer(float("inf"))
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """Called by the watch, in the loop's thread."""
        self.expired = True
        self._task.cancel()


async def bounded(work: Awaitable[T], what: str, whom: str, seconds: float | None) -> T:
    """Awaits `work`; after `seconds` cancels it and raises a `DeadlineError` that says what was
    waited for, and on whom. A deadline inside it keeps its own error."""
    limit = deadline(seconds)
    try:
        with limit:
            return await work
    except TimeoutError as exc:
        if isinstance(exc, DeadlineError) or not limit.expired:
            raise
        raise DeadlineError(what, whom, seconds or 0.0) from exc


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks, and returns when all of them have ended, however they did."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Watch:
    """The deadlines of one event loop; only its thread comes here."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.open: set[deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.timer_at = float("inf")

    def set_timer(self, when: float) -> None:
        """Looks at the deadlines at `when`, and not before."""
        if self._timer is not None:
            self._timer.cancel()
        self.timer_at = when
        loop = self.loop()
        if loop is None or when == float("inf"):
            self._timer = None
        else:
            self._timer = loop.call_at(when, self._look)

    def _look(self) -> None:
        # The loop's clock has a resolution: it may call a hair early.
        due = [limit for limit in self.open if limit.when <= self.timer_at]
        self._timer = None
        self.open.difference_update(due)
        self.set_timer(min((limit.when for limit in self.open), default=float("inf")))
        for limit in due:
            limit.expire()


class _Here(threading.local):
    watch: _Watch | None = None


_here = _Here()
"""The watch of the loop that last ran in this thread."""
