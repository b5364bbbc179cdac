"""Things by their place, `module:attribute`, imported when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

_MOVED = {
    "ludic.envs.gsm8k": "ludic.envs.datasets.gsm8k",
    "ludic.envs.math": "ludic.envs.datasets.math",
    "ludic.envs.tic_tac_toe_teacher": "ludic.envs.tic_tac_toe.teacher",
}
"""Modules that run files and folders may still name by an earlier place."""


def resolve(place: str) -> Any:
    """What `module:attribute` stands for; the attribute may be dotted."""
    module, _, path = place.partition(":")
    thing: Any = import_module(_MOVED.get(module, module))
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package some of whose names are imported on first use. `modules`
    says where each of them lives: in a module, or at a `module:attribute` of another name."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = modules[name]
        value = resolve(place) if ":" in place else getattr(import_module(place), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


_names_are_stored = ContextVar("names_are_stored", default=False)


@contextmanager
def stored_names(stored: bool = True) -> Iterator[None]:
    """Within it, names come from stored data, which somebody else may have written: no function
    is imported for one. Threads of `ludic.workers` and processes of environments inherit this."""
    token = _names_are_stored.set(stored)
    try:
        yield
    finally:
        _names_are_stored.reset(token)


def names_are_stored() -> bool:
    """Whether the names of the present context come from stored data."""
    return _names_are_stored.get()
