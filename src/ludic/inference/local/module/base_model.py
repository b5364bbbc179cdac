"""The transformers model inside its wrappers."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


def base_causal_lm(model: nn.Module) -> nn.Module:
    """The causal LM inside compile and PEFT wrappers, or `model` itself; adapters stay in place."""
    inner: Any = model
    while True:
        if isinstance(compiled := getattr(inner, "_orig_mod", None), nn.Module):
            inner = compiled
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            return cast(nn.Module, inner)
