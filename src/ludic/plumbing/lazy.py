"""Things by their place, `module:attribute`, imported when they are first asked for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from ludic.plumbing.contexts import holding

_MOVED = {
    "ludic.envs.code_exec.calculator": "ludic.envs.code_exec.tools",
    "ludic.envs.gsm8k": "ludic.envs.dataset_qa_env",
    "ludic.envs.math": "ludic.envs.dataset_qa_env",
    "ludic.envs.datasets.gsm8k": "ludic.envs.dataset_qa_env",
    "ludic.envs.datasets.math": "ludic.envs.dataset_qa_env",
    "ludic.envs.tic_tac_toe_teacher": "ludic.envs.tic_tac_toe",
    "ludic.envs.tic_tac_toe.teacher": "ludic.envs.tic_tac_toe",
    "ludic.envs.tic_tac_toe.env": "ludic.envs.tic_tac_toe",
}
"""Modules that run files and folders may still name by an earlier place."""


def resolve(place: str) -> Any:
    """What `module:attribute` stands for; the attribute may be dotted."""
    module, look_up = _parts(place)
    try:
        return look_up(sys.modules[module])
    except (KeyError, AttributeError):  # not imported yet, or in this moment by another thread
        return look_up(import_module(module))


@lru_cache(maxsize=1024)
def _parts(place: str) -> tuple[str, Callable[[Any], Any]]:
    module, _, path = place.partition(":")
    return _MOVED.get(module, module), attrgetter(path)


def late_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package whose names are imported on first
    use.

    The stub beside the package's `file` (`__init__.pyi`) has the names, which type checkers read
    there, too: `from module import name as name`; or `from module import name`, which exports
    nothing yet, and further down `other_name = name`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported: dict[str, str] = {}
    places: dict[str, str] = {}
    for line in stub.body:
        match line:
            case ast.ImportFrom(module=module, names=names):
                imported |= {alias.name: f"{module}:{alias.name}" for alias in names}
                places |= {alias.asname: imported[alias.name] for alias in names if alias.asname}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)):
                places[name] = imported[value]

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = resolve(places[name])
        setattr(sys.modules[package], name, value)
        return value

    exported = sorted(places)
    return find, lambda: exported, exported


_names_are_stored = ContextVar("names_are_stored", default=False)


def stored_names(stored: bool = True) -> AbstractContextManager[None]:
    """Within it, names come from stored data, which somebody else may have written: no function
    is imported for one. Threads of `ludic.workers` and processes of environments inherit this."""
    return holding(_names_are_stored, stored)


def names_are_stored() -> bool:
    """Whether the names of the present context come from stored data."""
    return _names_are_stored.get()
