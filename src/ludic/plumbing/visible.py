"""Text of environments and models, as a terminal may be given it."""

from __future__ import annotations

import re

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
