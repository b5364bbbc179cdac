"""Python's plain values as JSON, and back: what crosses between a solution and its tests.

Numbers, text, None and lists are JSON's own; everything else is an object with its type's name. An
object of any other class does not cross, so no `__eq__` of a solution ever meets a test. Only the
standard library is used: both sandboxes run this file.
"""

from __future__ import annotations

import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 200
_EXACT = 2**53


class CannotCross(TypeError):
    """A value that is not plain data."""


def encode(value: Any, depth: int = 0) -> Any:
    """What `json.dumps` takes. Subclasses of plain types cross as those types."""
    if depth > MAX_DEPTH:
        raise CannotCross(f"it is nested deeper than {MAX_DEPTH}, or contains itself")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        plain = int.__int__(value)
        return plain if -_EXACT < plain < _EXACT else {"t": "int", "v": hex(plain)}
    if isinstance(value, float):
        plain_float = float.__float__(value)
        if math.isfinite(plain_float):
            return plain_float
        return {"t": "float", "v": repr(plain_float)}
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, dict):
        pairs = [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)]
        return {"t": "dict", "v": pairs}
    for name, base in _SEQUENCES.items():
        if isinstance(value, base):
            return {"t": name, "v": [encode(item, depth + 1) for item in base.__iter__(value)]}
    if isinstance(value, bytes | bytearray):
        return {"t": "bytes" if isinstance(value, bytes) else "bytearray", "v": value.hex()}
    if kind is complex:
        return {"t": "complex", "v": [encode(value.real), encode(value.imag)]}
    if kind is range:
        return {"t": "range", "v": [encode(n) for n in (value.start, value.stop, value.step)]}
    if kind is Decimal or kind is Fraction:
        return {"t": kind.__name__, "v": str(value)}
    if value is Ellipsis:
        return {"t": "Ellipsis", "v": None}
    raise CannotCross(f"a value of type {kind.__name__!r} is not plain data")


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    name, content = value["t"], value["v"]
    if name == "int":
        return int(content, 16)
    if name == "float":
        return float(content)
    if name == "dict":
        return {decode(k): decode(v) for k, v in content}
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item) for item in content)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "bytearray":
        return bytearray.fromhex(content)
    if name == "complex":
        return complex(*map(decode, content))
    if name == "range":
        return range(*map(decode, content))
    if name == "Decimal":
        return Decimal(content)
    if name == "Fraction":
        return Fraction(content)
    if name == "Ellipsis":
        return ...
    raise CannotCross(f"unknown tag {name!r}")


_SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
