"""`ludic envs`: the names of environments that a run file can use."""

from __future__ import annotations


def envs() -> None:
    """List the environments that can be named."""
    from ludic.registry import list_envs
    from ludic.runs.results.terminal import print_names

    print_names(list_envs())
