"""Why a call does not fit, in words: which argument is unknown, and which there are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ludic.errors import near_names


def misfit(factory: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """Why the factory does not take these arguments; None when it does."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some callables written in C have none
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        named = [
            name
            for name, parameter in list(signature.parameters.items())[len(args) :]
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        if unknown := [name for name in kwargs if name not in named]:
            return unknown_argument(unknown[0], named)
        return f"{exc}; it takes {signature}"
    return None


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """Says that there is no such argument, which one is near, and which there are."""
    known = list(known)
    near = near_names(name, known)
    hint = f"did you mean {near[0]!r}? " if near else ""
    there = f"there are: {', '.join(known)}" if known else "there are none"
    return f"it has no argument {name!r}; {hint}{there}"
