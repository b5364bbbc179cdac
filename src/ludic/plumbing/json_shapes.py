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
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

Check = Callable[[Any], bool]

MAX_DEPTH = 100
"""How deeply free-form values may be nested; deeper ones are taken for a cycle."""
MAX_INT_BITS = 14_000
"""Python reads back integers of up to 4300 digits."""
_NESTED = frozenset({dict, list})


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
    """Checks each item. There is one for every token, so that loops are in C where they can be."""
    fits, checks = shape.types.issuperset, set(shape.checks.values())
    if not checks:
        return lambda items: fits({*map(type, items)})
    if checks == {isfinite}:
        return lambda items: fits({*map(type, items)}) and all(map(isfinite, items))
    by_kind = _by_kind(shape)

    def check(items: Iterable[Any]) -> bool:
        for item in items:
            holds = by_kind.get(type(item))
            if holds is None or not holds(item):
                return False
        return True

    return check


def _by_kind(shape: Shape) -> dict[type, Check]:
    return {kind: shape.checks.get(kind, _anything) for kind in shape.types}


def _anything(value: Any) -> bool:
    return True


def _all_values(shape: Shape) -> Check:
    """The check of a dict whose keys are text."""
    by_kind = _by_kind(shape)

    def check(value: dict[Any, Any]) -> bool:
        for key, item in value.items():
            holds = by_kind.get(type(item))
            if holds is None or type(key) is not str or not holds(item):
                return False
        return True

    return check


def _all_keys(cls: Any) -> Check:
    """The check of a typed dict."""
    hints = get_type_hints(cls, include_extras=True)
    required = {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
    by_name = {name: _by_kind(_shape(hint)) for name, hint in hints.items()}

    def check(value: dict[Any, Any]) -> bool:
        for name, item in value.items():
            if name not in by_name:
                return False
            holds = by_name[name].get(type(item))
            if holds is None or not holds(item):
                return False
        return value.keys() >= required

    return check


def _all_fields(cls: type) -> Check:
    """The check of a dataclass, written out: an episode has hundreds of fields. For one with the
    fields `n: int | None` and `ids: tuple[int, ...]` it is

    def check(value):
        field = value.n
        if not (field is None or type(field) is n_int): return False
        field = value.ids
        if not (type(field) is ids_tuple and (not field or ids_tuple_holds(field))): return False
        return True
    """
    hints = get_type_hints(cls, include_extras=True)
    lines, known = ["def check(value):"], dict[str, Any]()
    for name in [field.name for field in fields(cls)]:
        ways = []
        shape = _shape(hints[name])
        for kind in sorted(shape.types, key=lambda kind: (kind in shape.checks, kind.__name__)):
            if kind is type(None):
                ways.append("field is None")
                continue
            known[f"{name}_{kind.__name__}"] = kind
            way = f"type(field) is {name}_{kind.__name__}"
            if (check := shape.checks.get(kind)) is not None:
                known[f"{name}_{kind.__name__}_holds"] = check
                empty = "not field or " if kind in (tuple, list) or check is _is_free else ""
                way += f" and ({empty}{name}_{kind.__name__}_holds(field))"
            ways.append(way)
        lines += [f"    field = value.{name}", f"    if not ({' or '.join(ways)}): return False"]
    made: dict[str, Check] = {}
    exec("\n".join([*lines, "    return True"]), known, made)  # from names of fields and types only
    return made["check"]


def _is_free(value: dict[Any, Any] | list[Any], depth: int = 1) -> bool:
    """Whether a dict or list is JSON through and through: exact types, finite numbers."""
    items: Iterable[Any] = value
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return False
        items = value.values()
    for item in items:
        kind = type(item)
        if kind is str or kind is bool or item is None:
            continue
        if kind is float:
            if not isfinite(item):
                return False
        elif kind is int:
            if item.bit_length() > MAX_INT_BITS:
                return False
        elif kind not in _NESTED or depth >= MAX_DEPTH or (item and not _is_free(item, depth + 1)):
            return False
    return True
