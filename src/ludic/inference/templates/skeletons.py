"""Conversations spelled without the template, where it only puts contents between other text.

Most chat templates look at a message's role and at its place, and add its content to the text as it
is. For such a template the text of two conversations with the same roles differs in the contents
alone. So it is rendered once for each series of roles, with holes for contents: what it put
around them, the skeleton, then spells every conversation of these roles. Rendering takes
microseconds for each message, and every turn of every episode renders its whole conversation.

A hole can be added to text and written out. Anything else that a template does with a content
(trims it, searches it, asks whether it is empty) would depend on it: a hole then raises, and
conversations of these roles are rendered one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

_MARK = "\ufdd1"
"""Around a hole's number. A code point that Unicode keeps for internal use: no template has it."""
_MARKED = re.compile(f"{_MARK}(\\d+){_MARK}")
_KEYS = ("role", "content")
_MOST_SHAPES = 512

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class Looked(BaseException):
    """The template looked into a content. Not an `Exception`, some of which Jinja's tests catch."""


def _look(*_: Any, **__: Any) -> NoReturn:
    raise Looked


class Hole:
    """A text with contents that are not known yet."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __add__(self, other: object) -> Hole:
        return Hole(self._text + _spelled(other))

    def __radd__(self, other: object) -> Hole:
        return Hole(_spelled(other) + self._text)

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __hash__ = _look
    __str__ = __repr__ = __format__ = __int__ = __float__ = __index__ = _look
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _look
    __mul__ = __rmul__ = __mod__ = __rmod__ = _look


def written(value: Any) -> Any:
    """What a template writes out for `value`: Jinja's `finalize`."""
    return value._text if type(value) is Hole else value


def is_text(value: Any) -> bool:
    """Jinja's test `string`, for which a hole is one."""
    return isinstance(value, str | Hole)


def _spelled(value: object) -> str:
    if type(value) is Hole:
        return value._text
    if type(value) is str:
        return value
    raise Looked


class Skeletons:
    """The skeletons of one template, by roles. `render` is the template, and `with_holes` the same
    one compiled to take holes. Safe to share between threads: at worst two make the same one."""

    def __init__(
        self, render: Callable[[Messages], str], with_holes: Callable[[Messages], str]
    ) -> None:
        self._render, self._with_holes = render, with_holes
        self._known: dict[tuple[str, ...], _Skeleton | None] = {}

    def spell(self, messages: Messages) -> str | None:
        """The conversation's text; None where the template must render it."""
        roles, contents = [], []
        for message in messages:
            if type(message) is not dict or tuple(message) != _KEYS:
                return None
            role, content = message.values()
            if type(role) is not str or type(content) is not str:
                return None
            roles.append(role)
            contents.append(content)
        shape = tuple(roles)
        try:
            skeleton = self._known[shape]
        except KeyError:
            skeleton = self._find(shape, messages, contents)
        return None if skeleton is None else skeleton.filled(contents)

    def _find(
        self, shape: tuple[str, ...], messages: Messages, contents: list[str]
    ) -> _Skeleton | None:
        if len(self._known) >= _MOST_SHAPES:
            return None
        skeleton = None
        holes = [{"role": r, "content": Hole(f"{_MARK}{i}{_MARK}")} for i, r in enumerate(shape)]
        try:
            skeleton = _Skeleton(_MARKED.split(self._with_holes(holes)))
            if skeleton.filled(contents) != self._render(messages):
                skeleton = None
        except (Looked, Exception):  # the template says itself what is wrong, when it renders
            skeleton = None
        self._known[shape] = skeleton
        return skeleton


class _Skeleton:
    """Text and the numbers of contents in turn, as `re.split` returns them."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts
        self._order = [int(number) for number in parts[1::2]]
        self._in_order = self._order == list(range(len(self._order)))

    def filled(self, contents: list[str]) -> str:
        parts = self._parts.copy()
        if self._in_order and len(contents) == len(self._order):
            parts[1::2] = contents
        else:
            parts[1::2] = [contents[number] for number in self._order]
        return "".join(parts)
