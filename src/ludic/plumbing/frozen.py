"""Frozen dataclasses that are cheap to make.

A frozen dataclass sets each field with a call of `object.__setattr__`: for ten fields that is two
thirds of what making the object costs, and an episode makes two dozen of them. `quick` gives the
class an `__init__` that assigns instead. Assigning is forbidden in the class itself, so a new
object is for that moment an instance of `opened`: a subclass with the same slots that allows it.
For the class below, `__init__` is written out as

    def __init__(self, x, y=default_y):
        if self.__class__ is not cls:       # of a derived class, with fields or slots of its own
            return original(self, x=x, y=y)
        become(self, '__class__', opened)   # object.__setattr__, the one such call
        self.x = x
        self.y = y
        self.__class__ = cls

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

_changers: dict[type, Callable[..., Any]] = {}
"""By class: `changed` for its objects."""


def quick(cls: type[T]) -> type[T]:
    """Decorates a frozen dataclass with slots: the same class, with another `__init__`. Derived
    classes are made as they would be without it."""
    thawed = {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    opened = type(cls.__name__, (cls,), {"__slots__": (), **thawed})
    known: dict[str, Any] = {  # the names that the written code may use
        "become": object.__setattr__,
        "cls": cls,
        "MISSING": MISSING,
        "SAME": object(),
        "new": object.__new__,
        "opened": opened,
        "original": cls.__init__,
    }
    names, parameters, keywords, defaults = [], ["self"], list[str](), []
    for field in fields(cls):  # type: ignore[arg-type]
        name, default = field.name, ""
        if not field.init:
            raise TypeError(f"{cls.__name__}.{name}: `quick` knows fields of `__init__` only")
        if field.default is not MISSING:
            known[f"default_{name}"], default = field.default, f"=default_{name}"
        elif field.default_factory is not MISSING:
            known[f"make_{name}"], default = field.default_factory, "=MISSING"
            defaults.append(f"if {name} is MISSING: {name} = make_{name}()")
        names.append(name)
        (keywords if field.kw_only else parameters).append(name + default)
    parameters += ["*", *keywords] if keywords else []
    same = ", ".join(f"{name}={name}" for name in names)
    init = [
        *defaults,
        f"if self.__class__ is not cls: return original(self, {same})",
        "become(self, '__class__', opened)",
        *(f"self.{name} = {name}" for name in names),
        "self.__class__ = cls",
        *(["self.__post_init__()"] if hasattr(cls, "__post_init__") else []),
    ]
    change = [
        "made = new(opened)",
        *(f"made.{name} = old.{name} if {name} is SAME else {name}" for name in names),
        "made.__class__ = cls",
        "return made",
    ]
    changes = ", ".join(f"{name}=SAME" for name in names)
    made = _function(f"__init__({', '.join(parameters)})", init, known)
    made.__annotations__ = cls.__init__.__annotations__
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = made  # type: ignore[method-assign]
    _changers[cls] = _function(f"changed(old, /, *, {changes})", change, known)
    return cls


def changed(value: T, /, **changes: Any) -> T:
    """What `dataclasses.replace` returns, without the checks in `__post_init__`: `value` passed
    them, and the caller vouches for the changes."""
    change: Callable[..., T] = _changers.get(type(value), replace)
    return change(value, **changes)


def _function(head: str, body: list[str], known: dict[str, Any]) -> Any:
    """The function with that head and those lines. All of them come from the names of fields."""
    made: dict[str, Any] = {}
    exec(f"def {head}:\n" + "\n".join(f"    {line}" for line in body), known, made)
    return made.popitem()[1]
