"""What other people's code may raise that is no `Exception`: `sys.exit`, a cancellation that nobody
asked for, a bare `BaseException`. It costs what that code was called for, and nothing more."""

from __future__ import annotations

import asyncio

from ludic.errors import LudicError
from ludic.plumbing.text import error_text


def is_for_us(error: BaseException) -> bool:
    """Whether an error that came out of a call is meant for the program: Ctrl-C, or a cancellation
    of the running task. A `CancelledError` that the called code raised by itself is not."""
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, KeyboardInterrupt)
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread: there is nothing to cancel
        return False
    return task is not None and task.cancelling() > 0


class contained:
    """Raises what is neither an `Exception` nor meant for us as an error of that kind."""

    __slots__ = ("_kind", "_whom")

    def __init__(self, kind: type[LudicError], whom: str) -> None:
        self._kind, self._whom = kind, whom

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, Exception) or is_for_us(error):
            return
        raise self._kind(f"{self._whom} raised {error_text(error)}") from error
