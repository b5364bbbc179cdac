"""The one place where text that a program wrote becomes text of ours: bounded, flat and clean."""

from __future__ import annotations

import json


def text_of(data: bytes, last: int | None = None) -> str:
    """Output as text, or its `last` characters; what is no UTF-8 is replaced."""
    text = data.decode("utf-8", "replace").strip()
    return text if last is None else text[-last:]


def text_of_line(line: bytes) -> str | None:
    """The text of a line that is one JSON string; None for anything else. A string has no depth,
    and a character that cannot be encoded (half of a pair) becomes a question mark."""
    if not (line.startswith(b'"') and line.endswith(b"\n")):
        return None
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None
