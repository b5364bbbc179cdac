"""Text from outside: environments, tools, programs, models and their errors.

A Python string may hold halves of surrogate pairs, which no UTF-8 can: one in a tool's answer would
stop whoever writes, sends or tokenises it. Text is cleaned once, where it enters.
"""

from __future__ import annotations

import re
from typing import Any

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
            clean_text(key): item if type(item) in _NUMBERS else clean_json(item)
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
