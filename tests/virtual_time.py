"""Event loops whose clock does not depend on the machine: it goes forward when nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_QUIET_S = 0.03


class _JumpingSelector:
    """Stands before a loop's selector. Where that finds nothing to do and no thread works for the
    loop, the clock jumps to the loop's next timer; it stands still otherwise."""

    def __init__(self, loop: Any) -> None:
        self._selector, self._run_in_executor = loop._selector, loop.run_in_executor
        self._threads = 0
        self.now = loop.time()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def time(self) -> float:
        return float(self.now)

    def run_in_executor(self, *args: Any) -> Any:
        future = self._run_in_executor(*args)
        self._threads += 1
        future.add_done_callback(self._ended)
        return future

    def select(self, timeout: float | None = None) -> Any:
        found = self._selector.select(0)
        if found or timeout is None or timeout <= 0:
            return found or self._selector.select(timeout)
        found = self._selector.select(_QUIET_S)
        if not found and not self._threads:
            self.now += timeout
        return found

    def _ended(self, _: object) -> None:
        self._threads -= 1


@contextmanager
def virtual_time() -> Iterator[None]:
    """Inside, a deadline of the running loop passes as soon as nothing else can happen before it,
    and never while something does, however slow the machine is. For peers in the same loop."""
    loop: Any = asyncio.get_running_loop()
    real, jumping = loop.time, _JumpingSelector(loop)
    before = loop._selector, loop.run_in_executor
    loop._selector, loop.run_in_executor = jumping, jumping.run_in_executor
    loop.time = jumping.time
    try:
        yield
    finally:
        loop._selector, loop.run_in_executor = before
        ahead = jumping.now - real()
        loop.time = lambda: real() + ahead  # it does not go back: timers are set
