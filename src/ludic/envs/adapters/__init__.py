"""Environments of other packages, each under its package's name, each behind an extra.

A module here imports its package when an environment is made, and not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ludic.errors import ConfigError, MissingExtraError
from ludic.plumbing.lazy import names_are_stored


def load_package(module: str, extra: str) -> Any:
    """Imports `module`; if its package is not installed, a `MissingExtraError` names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] == package:
            raise MissingExtraError(package, extra) from error
        raise ConfigError(f"{package!r} is installed but cannot be imported: {error}") from error


def refuse_stored(what: str, remedy: str) -> None:
    """Raises if the names of this context come from stored data, which must not get just any
    code imported or started."""
    if names_are_stored():
        raise ConfigError(f"{what} is named by stored data, for which no code is loaded: {remedy}")


def plain(value: Any) -> Any:
    """`value` as JSON: other libraries' numbers and arrays become Python's, and what has no
    JSON form becomes its text."""
    from pydantic_core import to_jsonable_python

    def fallback(other: Any) -> Any:
        return other.tolist() if hasattr(other, "tolist") else str(other)

    return to_jsonable_python(value, bytes_mode="base64", fallback=fallback)
