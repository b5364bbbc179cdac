"""Where an exception was raised, as the author of an environment or a parser wants to know it."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ludic.errors import AgentError, EnvError, LudicError, ToolError
from ludic.plumbing.text import clean_text, error_text

_USERS = (EnvError, AgentError, ToolError)
"""Errors of Ludic's that a user's code may raise itself."""
TRACEBACK = "traceback"
"""The key in the `meta` of a failed rollout that has the traceback."""


def described(error: BaseException) -> str:
    """Returns the exception as one line, with file and line of the user's own code if it came
    from there."""
    text, place = error_text(error), place_of(error)
    return text if place is None or place in text else f"{text} ({place})"


def place_of(error: BaseException) -> str | None:
    """Returns "file.py, line 3, in step": the innermost frame of the user's code; None if that had
    no part in it, or only called for something that failed elsewhere (a server, say)."""
    chain = list(_causes(error))
    if isinstance(chain[0], LudicError) and not isinstance(chain[0], _USERS):
        return None
    frame = next((f for e in chain for f in reversed(_frames(e)) if _is_users(f)), None)
    return frame and f"{_shown(frame.filename)}, line {frame.lineno}, in {frame.name}"


def users_traceback(error: BaseException) -> str | None:
    """Returns the traceback of what was raised first, from the user's code on, if it came from
    there. What called that is left out: it depends on where the episode ran. None for errors of
    Ludic's own, whose text says enough."""
    first = next(_causes(error))
    if isinstance(first, LudicError) and place_of(error) is None:
        return None
    whole = traceback.TracebackException.from_exception(first)
    own = [number for number, frame in enumerate(whole.stack) if _is_users(frame)]
    whole.stack = traceback.StackSummary.from_list(whole.stack[own[0] if own else 0 :])
    return clean_text("".join(whole.format()).rstrip())


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that led to this one, the first one first."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return reversed(chain)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


@cache
def _others() -> tuple[str, ...]:
    """The folders of Ludic, of Python's library and of installed packages."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places |= {str(Path(__file__).parent.parent), os.path.dirname(os.__file__)}
    return tuple(place + os.sep for place in places if place)


def _is_users(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    return not (name.startswith("<frozen") or name.startswith(_others()) or name == sys.executable)


def _shown(file: str) -> str:
    """The path from here, where that is shorter."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
