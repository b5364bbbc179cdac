"""Whether a value is, to the exact type, what its annotations say.

Such a value can be written by an encoder that checks nothing. The answer "no" is always safe: it
only means that a slower way has to look at the value.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from math import isfinite
from operator import attrgetter
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

Check = Callable[[Any], bool]

MAX_DEPTH = 100
"""How deeply free-form values may be nested; deeper ones are taken for a cycle."""
MAX_INT_BITS = 14_000
"""Python reads back integers of up to 4300 digits."""
_PLAIN = frozenset({str, bool, type(None)})
_NESTED = frozenset({dict, list})
_TEXT = frozenset({str})


@dataclass(frozen=True, slots=True)
class Shape:
    """What an annotation allows: exact types, and for some of these a check of the value."""

    types: frozenset[type]
    checks: Mapping[type, Check]

    def holds(self, value: Any) -> bool:
        """Whether `value` has this shape."""
        kind = type(value)
        return kind in self.types and (kind not in self.checks or self.checks[kind](value))


@cache
def shape_of(hint: Any) -> Shape | None:
    """The shape of an annotation, or None for one that is not known here."""
    try:
        return _shape(hint)
    except LookupError:
        return None


def _shape(hint: Any) -> Shape:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Annotated, NotRequired):
        return _shape(args[0])
    if origin in (Union, types.UnionType):
        shapes = [_shape(arg) for arg in args]
        return Shape(
            frozenset().union(*(shape.types for shape in shapes)),
            {kind: check for shape in shapes for kind, check in shape.checks.items()},
        )
    if hint in (str, int, bool, type(None)):
        return Shape(frozenset({hint}), {})
    if hint is float:
        return Shape(frozenset({float, int}), {float: isfinite, int: isfinite})
    if origin is Literal:
        return Shape(frozenset(map(type, args)), dict.fromkeys(map(type, args), args.__contains__))
    if origin is tuple and args[1:] == (...,):
        return Shape(frozenset({tuple}), {tuple: _all_items(_shape(args[0]))})
    if origin is list:
        return Shape(frozenset({list}), {list: _all_items(_shape(args[0]))})
    if origin is Mapping and args[0] is str:
        check = _is_free if args[1] is Any else _all_values(_shape(args[1]))
        return Shape(frozenset({dict}), {dict: check})
    if is_typeddict(hint):
        return Shape(frozenset({dict}), {dict: _all_keys(hint)})
    if isinstance(hint, type) and is_dataclass(hint):
        return Shape(frozenset({hint}), {hint: _all_fields(hint)})
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Shape(frozenset({hint}), {})
    raise LookupError(hint)


def _all_items(shape: Shape) -> Check:
    """Checks each item; the loops are in C, since there is an item for every token."""
    checks = list(shape.checks.values())
    fits = shape.types.issuperset
    if not checks:
        return lambda items: fits(map(type, items))
    if len(set(checks)) == 1 and len(checks) == len(shape.types):
        check = checks[0]
        return lambda items: fits(map(type, items)) and all(map(check, items))
    return lambda items: all(map(shape.holds, items))


def _all_values(shape: Shape) -> Check:
    values_hold = _all_items(shape)
    return lambda mapping: _has_text_keys(mapping) and values_hold(mapping.values())


def _all_keys(cls: Any) -> Check:
    """The check of a typed dict."""
    hints = get_type_hints(cls, include_extras=True)
    required = {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
    shapes = {name: _shape(hint) for name, hint in hints.items()}
    rules = {name: (s.types, s.checks, name in required) for name, s in shapes.items()}

    def check(value: dict[Any, Any]) -> bool:
        found = 0
        for name, item in value.items():
            if name not in rules:
                return False
            kinds, checks, counts = rules[name]
            kind = type(item)
            if kind not in kinds or (kind in checks and not checks[kind](item)):
                return False
            found += counts
        return found == len(required)

    return check


_Left = tuple[tuple[int, Check, bool], ...]
"""What is left to check of some values whose types are right: position, check, and whether an empty
one needs it."""
_MAX_KNOWN = 256


def _all_fields(cls: type) -> Check:
    """The check of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in fields(cls)]
    if len(names) < 2:
        raise LookupError(cls)  # of one name, attrgetter returns no tuple
    shapes = [_shape(hints[name]) for name in names]
    read: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)
    known: dict[tuple[type, ...], _Left | None] = {}

    def check(value: Any) -> bool:
        values = read(value)
        kinds = (*map(type, values),)
        try:
            left = known[kinds]
        except KeyError:
            left = _left(shapes, kinds)
            if len(known) < _MAX_KNOWN:
                known[kinds] = left
        if left is None:
            return False
        for at, check, always in left:
            item = values[at]
            if (item or always) and not check(item):
                return False
        return True

    return check


def _left(shapes: list[Shape], kinds: tuple[type, ...]) -> _Left | None:
    """None if a type is wrong. It depends on the types alone, of which there are few combinations,
    so the callers keep it."""
    if not all(kind in shape.types for shape, kind in zip(shapes, kinds, strict=True)):
        return None
    found = ((at, shape.checks.get(kinds[at])) for at, shape in enumerate(shapes))
    return tuple(
        (at, check, not (kinds[at] in (tuple, list) or check is _is_free))
        for at, check in found
        if check is not None
    )


def _is_free(value: dict[Any, Any] | list[Any], depth: int = 0) -> bool:
    """Whether a dict or list is JSON through and through: exact types, finite numbers."""
    if depth >= MAX_DEPTH:
        return False
    items: Iterable[Any] = value
    if type(value) is dict:
        if not _has_text_keys(value):
            return False
        items = value.values()
    for item in items:
        kind = type(item)
        if kind in _PLAIN:
            continue
        if kind is int:
            if item.bit_length() > MAX_INT_BITS:
                return False
        elif kind is float:
            if not isfinite(item):
                return False
        elif kind not in _NESTED or not _is_free(item, depth + 1):
            return False
    return True


def _has_text_keys(value: dict[Any, Any]) -> bool:
    return _TEXT.issuperset(map(type, value))
