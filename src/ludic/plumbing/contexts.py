"""Context variables that have a value for as long as a block takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within it, the variable has the value; then the one that it had before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
