"""Holds every call of a tensor function to the shapes in its annotations.

jaxtyping's import hook puts `check_shapes` around the functions and dataclasses of the modules that
conftest.py names. Only shapes and element types are looked at; mypy sees to the rest.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxtyping import AbstractArray

F = TypeVar("F", bound=Callable[..., Any])


def check_shapes(function: F) -> F:
    """`function`, which raises `TypeError` for a tensor of another shape than it says."""
    signature = inspect.signature(function)
    hints: dict[str, Any] | None = None

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal hints
        if hints is None:  # not earlier: a name may be defined further down in its module
            hints = get_type_hints(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            _check(value, hints.get(name), f"{function.__qualname__}: {name}")
        result = function(*args, **kwargs)
        _check(result, hints.get("return"), f"{function.__qualname__}: its result")
        return result

    return checked if _is_shaped(function) else function  # type: ignore[return-value]


def _is_shaped(function: Callable[..., Any]) -> bool:
    """Whether an annotation names a shape; functions without one keep their speed."""
    named = (str(hint) for hint in getattr(function, "__annotations__", {}).values())
    return any(word in hint for hint in named for word in ("Float[", "Int[", "Bool[", "Objective"))


def _check(value: Any, hint: Any, where: str) -> None:
    if not _fits(value, hint):
        shape = getattr(value, "shape", None)
        raise TypeError(f"{where} is of shape {shape}, dtype {getattr(value, 'dtype', None)}")


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return all(map(_fits, value, get_args(hint)))
    if hint is type(None):
        return value is None
    shaped = inspect.isclass(hint) and issubclass(hint, AbstractArray)
    return isinstance(value, hint) if shaped else True
