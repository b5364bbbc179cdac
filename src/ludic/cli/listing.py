"""`ludic envs` and `ludic algorithms`: the names that a run file can use."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def envs() -> None:
    """List the environments that can be named."""
    from ludic.registry import list_envs

    _print_names(list_envs())


def algorithms() -> None:
    """List the algorithms that can be named."""
    from ludic.training.algorithms import list_algorithms

    _print_names(list_algorithms())


def _print_names(names: Mapping[str, str]) -> None:
    width = max(map(len, names), default=0)
    for name, line in names.items():
        sys.stdout.write(f"{name:<{width}}  {line}\n")
