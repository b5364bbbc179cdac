"""How much an engine holds: what a token keeps, the longest context, the prefix cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.inference.local.arena import KVShape
from ludic.inference.local.module.view import device_and_dtype

_CPU_CACHE_BYTES = 256 << 20
_GPU_CACHE_BYTES = 4 << 30
_GPU_CONTEXT = 4096


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model, which a larger one may hold."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def cache_tokens(shape: KVShape, device: torch.device) -> int:
    """How many tokens the prefix cache holds where no number is set."""
    budget = _GPU_CACHE_BYTES if device.type == "cuda" else _CPU_CACHE_BYTES
    return max(1, budget // shape.bytes_per_token)


def context_tokens(wanted: int | None, config: Any, device: torch.device) -> int:
    """The longest prompt plus completion; raises `ConfigError` for more than the model takes."""
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    if wanted is None:
        if not limit:
            raise ConfigError("the model names no longest context: set max_context_tokens")
        wanted = min(limit, _GPU_CONTEXT) if device.type == "cuda" else limit
    if limit and wanted > limit:
        raise ConfigError(f"max_context_tokens={wanted} is more than the model's {limit} positions")
    if wanted < 2:
        raise ConfigError(f"max_context_tokens={wanted}: a prompt and a completion need 2")
    return wanted


def kv_shape(model: nn.Module, config: Any) -> KVShape:
    """What a token of this model keeps, and where."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ConfigError(
            f"{type(model).__name__} has no attention heads: the in-process engine serves families "
            "that keep keys and values"
        )
    try:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    except Exception as exc:  # transformers raises for sizes that differ from layer to layer
        raise ConfigError(
            f"{type(model).__name__} does not say how large its keys are ({exc}): the in-process "
            "engine serves families whose layers are alike; sample through a vLLM server "
            "(VLLMChatClient) instead"
        ) from exc
    device, dtype = device_and_dtype(model)
    return KVShape(config.num_hidden_layers, kv_heads, head_dim, dtype, device)
