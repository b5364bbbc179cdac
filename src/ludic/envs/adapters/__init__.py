"""Environments of other packages, each under its package's name, each behind an extra.

A module here imports its package when an environment is made, and not before.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
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
    if value is None or isinstance(value, bool | str):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)
