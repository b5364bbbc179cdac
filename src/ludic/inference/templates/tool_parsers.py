"""Reads tool calls from the text that a model wrote.

A parser reports what it cannot read and never guesses: broken JSON is not repaired, a list is not
taken for an object, and a name is not inferred. All parsers run in linear time, whatever the text,
since the text is the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from ludic.parsers import strict_json
from ludic.registry import TOOL_PARSERS
from ludic.types import ToolCall

MAX_REPORTED = 8
"""How many malformed calls of one completion are described; the rest are counted."""


@dataclass(frozen=True, slots=True)
class ToolParse:
    """What a completion's text holds: the prose around the calls, the calls, and one sentence
    for each call that could not be read. The text of an unreadable call stays in `content`."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


@runtime_checkable
class ToolParser(Protocol):
    """Reads tool calls out of text. `markers` are the strings that frame a call, next to which
    white space carries no meaning; () when there are none."""

    @property
    def markers(self) -> tuple[str, ...]: ...

    def parse(self, text: str) -> ToolParse: ...


class MalformedCallError(ValueError):
    """A tool call that cannot be read; the message is the sentence that is reported."""


# An opening tag and the next closing one, with no other opening tag between them. Nothing is ever
# tried again at another place, which keeps it linear.
# No `*+` of a group: Python 3.11.4 and older misread it.
_HERMES_BLOCK = re.compile(r"<tool_call>([^<]*+(?:<(?!/?tool_call>)[^<]*+)*)</tool_call>")


class HermesToolParser:
    """Calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    OPEN: ClassVar[str] = "<tool_call>"
    CLOSE: ClassVar[str] = "</tool_call>"
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def parse(self, text: str) -> ToolParse:
        calls: list[ToolCall] = []
        errors: list[str] = []

        def left_of(block: re.Match[str]) -> str:
            try:
                calls.append(tool_call(read_json(block[1]), len(calls), ("arguments",)))
            except MalformedCallError as exc:
                errors.append(str(exc))
                return block[0]
            return ""

        content = _HERMES_BLOCK.sub(left_of, text)
        errors.extend(self._stray_tags(content, len(errors)))
        return ToolParse(content.strip() if calls else content, tuple(calls), _capped(errors))

    def _stray_tags(self, prose: str, reported: int) -> Iterator[str]:
        """Tags that found no partner. Reported blocks are in the prose too, with their pair."""
        opened = prose.count(self.OPEN) - reported
        closed = prose.count(self.CLOSE) - reported
        if opened > 0:
            yield f"{opened} {self.OPEN} without {self.CLOSE}: close every tool call"
        if closed > 0:
            yield f"{closed} {self.CLOSE} without {self.OPEN}: open every tool call"


class JSONToolParser:
    """Calls as plain JSON: the whole completion is one object, or a list of objects, each
    `{"name": ..., "arguments": {...}}` (`parameters` is read as well).

    Text that does not begin with `{` or `[{` is prose and calls nothing.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def parse(self, text: str) -> ToolParse:
        stripped = text.strip()
        is_list = stripped.startswith("[") and stripped[1:].lstrip().startswith("{")
        if not (is_list or stripped.startswith("{")):
            return ToolParse(text)
        try:
            value = read_json(stripped)
        except MalformedCallError as exc:
            return ToolParse(text, errors=(str(exc),))
        calls: list[ToolCall] = []
        errors: list[str] = []
        for item in value if is_list else [value]:
            try:
                calls.append(tool_call(item, len(calls), ("arguments", "parameters")))
            except MalformedCallError as exc:
                errors.append(str(exc))
        # One unreadable item leaves the text as it was written: there is no prose to cut out.
        return ToolParse(text if errors else "", tuple(calls), _capped(errors))


def read_json(body: str) -> Any:
    """Strict JSON, or a `MalformedCallError`."""
    try:
        return strict_json(body)
    except ValueError as exc:
        raise MalformedCallError(f"broken JSON in a tool call: {exc}: {_excerpt(body)}") from None


def tool_call(value: Any, index: int, argument_keys: tuple[str, ...]) -> ToolCall:
    """The call that a JSON value describes, or a `MalformedCallError`."""
    if not isinstance(value, dict):
        raise MalformedCallError(
            f"a tool call must be a JSON object with a name and arguments, "
            f"not {_kind(value)}: {_excerpt(json.dumps(value))}"
        )
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCallError(
            'a tool call without a "name" that is a non-empty string: '
            f"{_excerpt(json.dumps(value))}"
        )
    present = [key for key in argument_keys if key in value]
    if len(present) != 1:
        what = "has both of" if present else "lacks"
        keys = " or ".join(f'"{key}"' for key in argument_keys)
        raise MalformedCallError(f"the call of {name!r} {what} {keys}: give one JSON object")
    arguments = value[present[0]]
    if not isinstance(arguments, dict):
        raise MalformedCallError(
            f"the arguments of {name!r} must be a JSON object, not {_kind(arguments)}"
        )
    return {
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), "an object")


def _excerpt(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")


def _capped(errors: list[str]) -> tuple[str, ...]:
    if len(errors) <= MAX_REPORTED:
        return tuple(errors)
    more = len(errors) - MAX_REPORTED
    return (*errors[:MAX_REPORTED], f"and {more} more malformed tool calls")


def get_tool_parser(name: str) -> ToolParser:
    """A tool parser by name or place."""
    return TOOL_PARSERS.make(name)  # type: ignore[no-any-return]
