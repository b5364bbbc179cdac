"""What other people's code may raise that is no `Exception`: `sys.exit`, a cancellation that nobody
asked for, a bare `BaseException`. It costs what that code was called for, and nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def contained(kind: type[LudicError], whom: str) -> Iterator[None]:
    """Raises what is neither an `Exception` nor meant for us as an error of that kind."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if is_for_us(error):
            raise
        raise kind(f"{whom} raised {error_text(error)}") from error
