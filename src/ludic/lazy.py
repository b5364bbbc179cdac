"""Things by their place, `module:attribute`, imported when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
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
    module, path = _parts(place)
    try:
        return _look_up(sys.modules[module], path)
    except (KeyError, AttributeError):  # not imported yet, or in this moment by another thread
        return _look_up(import_module(module), path)


@lru_cache(maxsize=1024)
def _parts(place: str) -> tuple[str, tuple[str, ...]]:
    module, _, path = place.partition(":")
    return _MOVED.get(module, module), tuple(path.split("."))


def _look_up(thing: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        thing = getattr(thing, part)
    return thing


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package some of whose names are imported on first use. `modules`
    says where each of them lives."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
