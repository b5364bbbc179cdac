"""Text from outside: environments, tools, programs, models and their errors.

A Python string may hold halves of surrogate pairs, which no UTF-8 can: one in a tool's answer would
stop whoever writes, sends or tokenises it. Text is cleaned once, where it enters. An error
is described with the place in the user's own code that it came from.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ludic.errors import AgentError, EnvError, LudicError, ToolError

REPLACEMENT = "\ufffd"


def clean_text(text: str) -> str:
    """The text as UTF-8 can hold it: two halves that make a pair become their character, and any
    other half becomes `REPLACEMENT`.

    >>> clean_text("a\\ud83d\\ude00b") == "a\\U0001f600b"
    True
    >>> clean_text("\\ud800!") == REPLACEMENT + "!"
    True
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


_NUMBERS = (int, float, bool)


def clean_json(value: Any) -> Any:
    """A copy of a JSON value, to the last list, with its text and its keys cleaned. Whoever made
    the value may change it afterwards."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {
            key if key.isascii() else clean_text(key): (
                item if type(item) in _NUMBERS else clean_json(item)
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [clean_json(item) for item in value]
    return value


def error_text(error: BaseException) -> str:
    """An error of somebody else's code in one line of a record: its type and what it says."""
    return f"{type(error).__name__}: {words_of(error)}"


def words_of(error: BaseException) -> str:
    """What an error says, fit to be stored."""
    try:
        return clean_text(str(error))
    except Exception:  # its own `__str__` is broken
        return "(it cannot say why)"


# Control characters but newline and tab; marks that turn the direction of what follows, or break
# lines; and halves of a pair, which cannot be encoded.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Writes out what a terminal would obey instead of showing it.

    >>> print(visible("\\x1b[2J You won!\\r\\n"), end="")
    \\x1b[2J You won!
    """
    return _UNSEEN.sub(lambda match: _written(match[0]), text.replace("\r\n", "\n"))


def _written(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


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
