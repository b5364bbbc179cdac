"""Why a call does not fit, in words: which argument is unknown, and which there are."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any


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


def near_names(name: str, known: Iterable[str], n: int = 1, cutoff: float = 0.5) -> list[str]:
    """Returns the names that may have been meant, the nearest first: those that `name` is short for
    (`lr`: `learning_rate`; `temp`: `temperature`), and those that are spelled alike."""
    known = list(known)
    meant = [k for k in known if _is_short_for(name.lower(), k)]
    if len(name) < 4:
        cutoff = max(cutoff, 0.6)  # two letters are in many names
    alike = difflib.get_close_matches(name, known, n=n, cutoff=cutoff)
    if alike and difflib.SequenceMatcher(None, name, alike[0]).ratio() >= 0.8:
        meant = [*alike, *meant]  # a slip of the finger
    return list(dict.fromkeys([*meant, *alike]))[:n]


def _is_short_for(short: str, name: str) -> bool:
    words = re.split(r"[_.\- ]", name.lower())
    initials = "".join(word[:1] for word in words)
    return len(short) >= 2 and (short == initials or (len(short) > 2 and name.startswith(short)))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" with the nearest of `known`, or with all of them if none is
    near; nothing if there are none."""
    known = sorted(known)
    near = near_names(name, known)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are: {', '.join(known)}" if known else ""
