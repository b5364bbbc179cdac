"""Runs beside a solution, in its sandbox: calls its functions when it is asked to.

The first line that it writes is a string that says whether the solution could be loaded; then each
line that it reads is a call, and each that it writes an answer. What the solution prints goes
elsewhere.

Values cross as tagged JSON: numbers, text, None and lists are JSON's own; everything else plain is
an object with its type's name. An object of any other class does not cross, so no `__eq__` of a
solution ever meets a test. Only the standard library is used: both sandboxes run this file.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any, TextIO

MAX_DEPTH = 200
_EXACT = 2**53


def begin() -> tuple[TextIO, TextIO, dict[str, Any]]:
    """The two ends of this process, which its code finds empty and silent, and its job."""
    reading = os.fdopen(os.dup(0), "r", encoding="utf-8")
    writing = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")  # a line is sent at once
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with open("job.json", encoding="utf-8") as file:
        return reading, writing, json.load(file)


def main() -> None:
    calls, answers, job = begin()
    names: dict[str, Any] = {"__name__": "solution"}
    report = "ready"
    try:
        with open("solution.py", "rb") as source:
            text = source.read()
        try:
            code = compile(text, "solution.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            report = f"no_python {last_line(error)}"
        else:
            load_setup(job["setup"], names)
            exec(code, names)
            if not callable(names.get(job["entry_point"])):
                report = f"failed there is no function {job['entry_point']!r}"
    except BaseException as error:
        report = f"failed {last_line(error)}"
        traceback.print_exc()
    answers.write(json.dumps(report) + "\n")
    if report != "ready":
        return
    for line in calls:
        answers.write(json.dumps(answer(json.loads(line), names)) + "\n")


def load_setup(setup: str, names: dict[str, Any]) -> None:
    """The helpers that a task's prompt brings. It may end in a function without a body."""
    if not setup:
        return
    try:
        code = compile(setup, "setup.py", "exec", dont_inherit=True)
    except SyntaxError:
        code = compile(setup.rstrip() + "\n    pass\n", "setup.py", "exec", dont_inherit=True)
    exec(code, names)


def answer(call: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The value or the exception of one call, and its arguments if they were changed."""
    try:
        args = decode(call["args"])
        kwargs = decode(call["kwargs"])
        value = names[call["function"]](*args, **kwargs)
        answered: dict[str, Any] = {"value": encode(value)}
        after = encode(args)
        if after != call["args"]:
            answered["args"] = after
        return answered
    except BaseException as error:
        traceback.print_exc()
        return {"error": [type(error).__name__, str(error)[:1000]]}


def last_line(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()[:1000]


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
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item) for item in content)
    if name not in _PLAIN:
        raise CannotCross(f"unknown tag {name!r}")
    return _PLAIN[name](content)


_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_PLAIN: dict[str, Any] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "dict": lambda pairs: {decode(k): decode(v) for k, v in pairs},
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*map(decode, parts)),
    "range": lambda ends: range(*map(decode, ends)),
    "Decimal": Decimal,
    "Fraction": Fraction,
    "Ellipsis": lambda _: ...,
}
