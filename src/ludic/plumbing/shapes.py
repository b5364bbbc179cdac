"""Shapes of tensors, checked on every call: jaxtyping reads the annotations, beartype checks.

Off unless it is asked for, since it costs time: `LUDIC_CHECK_SHAPES=1` in the environment, or
`check_shapes()` before the first import of `ludic.training`. A tensor of another shape or element
type than its annotation says is then an error that names the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

from ludic.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

SETTING = "LUDIC_CHECK_SHAPES"
CHECKED = tuple(f"ludic.training.{name}" for name in ("algorithms", "losses", "types", "update"))
"""The modules whose functions take tensors."""


def check_shapes() -> None:
    """Checks the modules in `CHECKED` from their import on."""
    if find_spec("beartype") is None:
        raise ConfigError("checking the shapes of tensors needs beartype: pip install beartype")
    from jaxtyping import install_import_hook

    install_import_hook(list(CHECKED), f"{__name__}.checked")


def checked(function: F) -> F:
    """`function`, by beartype, if its annotations name a shape; mypy sees to the others, which keep
    their speed."""
    named = (str(hint) for hint in getattr(function, "__annotations__", {}).values())
    shaped = any(word in hint for hint in named for word in ("Float[", "Int[", "Bool["))
    if not shaped:
        return function
    from beartype import beartype

    typed: F = beartype(function)
    return typed
