"""How much an engine holds: what a token keeps, the longest context, the prefix cache, and what all
of it takes of a device's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.inference.local.arena import KVShape
from ludic.inference.local.view import device_and_dtype
from ludic.memory import engine
from ludic.memory.shape import ModelShape
from ludic.plumbing.model_parts import base_causal_lm, config_facts, text_config


def cache_tokens(shape: KVShape, device: torch.device) -> int:
    """How many tokens the prefix cache holds where no number is set."""
    return engine.cache_tokens(shape.bytes_per_token, device.type)


def context_tokens(wanted: int | None, config: Any, device: torch.device) -> int:
    """The longest prompt plus completion; raises `ConfigError` for more than the model takes."""
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    if wanted is None:
        if not limit:
            raise ConfigError("the model names no longest context: set max_context_tokens")
        wanted = engine.default_context(limit, device.type)
    if limit and wanted > limit:
        raise ConfigError(
            f"max_context_tokens={wanted} is more than the model's {limit} positions: set it to "
            f"{limit} at most"
        )
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


def engine_memory(
    model: nn.Module,
    *,
    max_slots: int,
    max_context_tokens: int | None = None,
    deterministic: bool | None = None,
    prefix_cache_tokens: int | None = None,
    device: torch.device | None = None,
) -> engine.EngineMemory:
    """What a `LocalChatClient` with these settings takes on a GPU, beside the model's weights.

    `device`: where the engine will be; None: where the model is.
    """
    model = base_causal_lm(model)
    config = text_config(model)
    kv = kv_shape(model, config)
    shape = ModelShape.of(config_facts(model))
    if shape is None:
        raise ConfigError(f"{type(model).__name__} does not say how large its layers are")
    where = device or kv.device
    return engine.engine_bytes(
        shape,
        slots=max_slots,
        context=context_tokens(max_context_tokens, config, where),
        item=kv.dtype.itemsize,
        device=where.type,
        deterministic=bool(deterministic),
        prefix_cache_tokens=prefix_cache_tokens,
    )
