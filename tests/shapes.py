"""Holds every call of a tensor function to the shapes in its annotations.

jaxtyping's import hook puts `check_shapes` around the functions and dataclasses of the modules that
conftest.py names. Only shapes and element types are looked at; mypy sees to the rest.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxtyping import AbstractArray

F = TypeVar("F", bound=Callable[..., Any])


def check_shapes(function: F) -> F:
    """`function`, which raises `TypeError` for a tensor of another shape than it says."""
    names = tuple(inspect.signature(function).parameters)
    hints: dict[str, Any] | None = None

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal hints
        if hints is None:  # not earlier: a name may be defined further down in its module
            found = get_type_hints(function).items()
            hints = {name: hint for name, hint in found if _has_shape(hint)}
        for name, value in chain(zip(names, args, strict=False), kwargs.items()):
            if name in hints and not _fits(value, hints[name]):
                raise _misfit(function, name, value)
        result = function(*args, **kwargs)
        if "return" in hints and not _fits(result, hints["return"]):
            raise _misfit(function, "its result", result)
        return result

    return checked if _is_shaped(function) else function  # type: ignore[return-value]


def _is_shaped(function: Callable[..., Any]) -> bool:
    """Whether an annotation names a shape; functions without one keep their speed."""
    named = (str(hint) for hint in getattr(function, "__annotations__", {}).values())
    return any(word in hint for hint in named for word in ("Float[", "Int[", "Bool[", "Objective"))


def _has_shape(hint: Any) -> bool:
    if inspect.isclass(hint):
        return issubclass(hint, AbstractArray)
    return any(map(_has_shape, get_args(hint)))


def _misfit(function: Callable[..., Any], what: str, value: Any) -> TypeError:
    facts = f"shape {getattr(value, 'shape', None)}, dtype {getattr(value, 'dtype', None)}"
    return TypeError(f"{function.__qualname__}: {what} is not as annotated: {facts}")


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return all(map(_fits, value, get_args(hint)))
    if hint is type(None):
        return value is None
    shaped = inspect.isclass(hint) and issubclass(hint, AbstractArray)
    return isinstance(value, hint) if shaped else True
