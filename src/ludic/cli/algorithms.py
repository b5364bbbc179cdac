"""`ludic algorithms`: the names of algorithms that a run file can use."""

from __future__ import annotations


def algorithms() -> None:
    """List the algorithms that can be named."""
    from ludic.registry import list_algorithms
    from ludic.runs.results.terminal import print_names

    print_names(list_algorithms())
