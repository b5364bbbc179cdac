"""Frozen dataclasses that are cheap to make.

A frozen dataclass sets its fields with `object.__setattr__`, one call each, which costs several
times as much as the rest of making it, and an episode makes two dozen of them. `quick` replaces
that: while an object is being made, it is of a subclass whose attributes can be assigned.

>>> from dataclasses import dataclass
>>> @quick
... @dataclass(frozen=True, slots=True)
... class Point:
...     x: int
...     y: int = 0
>>> changed(Point(1), y=2)
Point(x=1, y=2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

T = TypeVar("T")

_copiers: dict[type, Callable[[Any], Any]] = {}


def quick(cls: type[T]) -> type[T]:
    """Decorates a frozen dataclass with slots: the same class, with another `__init__`. Derived
    classes are made as they would be without it."""
    plain = {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    opened = type(cls.__name__, (cls,), {"__slots__": (), **plain})
    known: dict[str, Any] = {
        "become": object.__setattr__,
        "cls": cls,
        "MISSING": MISSING,
        "new": object.__new__,
        "opened": opened,
        "original": cls.__init__,
    }
    names, parameters, filled = [], ["self"], []
    for field in fields(cls):  # type: ignore[arg-type]
        name, default = field.name, ""
        if not field.init or field.kw_only:
            raise TypeError(f"{cls.__name__}.{name}: `quick` knows ordinary fields only")
        if field.default is not MISSING:
            known[f"default_{name}"], default = field.default, f"=default_{name}"
        elif field.default_factory is not MISSING:
            known[f"make_{name}"], default = field.default_factory, "=MISSING"
            filled.append(f"if {name} is MISSING: {name} = make_{name}()")
        names.append(name)
        parameters.append(name + default)
    init = [
        *filled,
        f"if self.__class__ is not cls: return original(self, {', '.join(names)})",
        "become(self, '__class__', opened)",
        *(f"self.{name} = {name}" for name in names),
        "self.__class__ = cls",
    ]
    if hasattr(cls, "__post_init__"):
        init.append("self.__post_init__()")
    copy = ["made = new(opened)", *(f"made.{name} = old.{name}" for name in names), "return made"]
    exec(_function(f"__init__({', '.join(parameters)})", init), known)
    exec(_function("copy(old)", copy), known)
    made: Any = known["__init__"]
    made.__annotations__ = cls.__init__.__annotations__
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = made  # type: ignore[method-assign]
    _copiers[cls] = known["copy"]
    return cls


def changed(value: T, **changes: Any) -> T:
    """What `dataclasses.replace` returns, without the checks in `__post_init__`: `value` passed
    them, and the caller vouches for the changes."""
    cls = type(value)
    copy = _copiers.get(cls)
    if copy is None:
        return replace(value, **changes)  # type: ignore[type-var]
    made: T = copy(value)
    try:
        for name, new in changes.items():
            setattr(made, name, new)
    except AttributeError:
        raise TypeError(f"a {cls.__name__} has no field {name!r}") from None
    made.__class__ = cls
    return made


def _function(head: str, body: list[str]) -> str:
    return f"def {head}:\n" + "\n".join(f"    {line}" for line in body)
