"""What the model is shown of the history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ludic.context.base import ContextStrategy
from ludic.context.full_dialog import FullDialog
from ludic.context.truncated_thinking import TruncatedThinkingContext
from ludic.context.windowed import WindowedDialog
from ludic.errors import ConfigError, UnknownNameError

_KINDS: Mapping[str, Callable[..., ContextStrategy]] = {
    "full_dialog": FullDialog,
    "truncated_thinking": TruncatedThinkingContext,
    "windowed": WindowedDialog,
}


def make_context(spec: str | Mapping[str, Any]) -> ContextStrategy:
    """A new context from JSON: `"full_dialog"`, or `{"kind": "windowed", "max_turns": 3}`."""
    options = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = options.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"a context's spec needs a 'kind', one of {sorted(_KINDS)}: {spec!r}")
    if kind not in _KINDS:
        raise UnknownNameError("context", kind, _KINDS)
    try:
        return _KINDS[kind](**options)
    except TypeError as error:
        raise ConfigError(f"context {kind!r} cannot be made from {options}: {error}") from error


__all__ = [
    "ContextStrategy",
    "FullDialog",
    "TruncatedThinkingContext",
    "WindowedDialog",
    "make_context",
]
