"""What the model is shown of the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.context.base import ContextStrategy as ContextStrategy
from ludic.context.compacting import CompactingDialog as CompactingDialog
from ludic.context.full_dialog import FullDialog as FullDialog
from ludic.context.full_dialog import WindowedDialog as WindowedDialog
from ludic.context.truncated_thinking import TruncatedThinkingContext as TruncatedThinkingContext
from ludic.registry import CONTEXTS


def make_context(spec: str | Mapping[str, Any]) -> ContextStrategy:
    """A new context from JSON: `"full_dialog"`, or `{"kind": "windowed", "max_turns": 3}`."""
    return CONTEXTS.make_from(spec)  # type: ignore[no-any-return]
