"""How much an engine holds: what a token keeps, the longest context, the prefix cache, and what all
of it takes of a device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.inference.local.arena import KVShape, arena_bytes
from ludic.inference.local.attention import MAX_MASK
from ludic.inference.local.view import device_and_dtype
from ludic.plumbing.model_parts import base_causal_lm, text_config

MAX_TOKENS = 32_768
"""The most tokens of one forward pass on a GPU."""


_CPU_CACHE_BYTES = 256 << 20
_GPU_CACHE_BYTES = 4 << 30
_GPU_CONTEXT = 4096


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


_SCORED_ROWS = 512
_BYTES_PER_LOGIT = 16
"""A logit in the model's type, in float32 and scaled, and what a sampler or a graph keeps of it."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """In bytes: the slots, the prefix cache when it is full, and what a step needs at most.

    The first two are exact. The last is an estimate of the largest prompt pass and of the logits.
    """

    slots: int
    prefix_cache: int
    step: int

    @property
    def total(self) -> int:
        return self.slots + self.prefix_cache + self.step


def engine_memory(
    model: nn.Module,
    *,
    max_slots: int,
    max_context_tokens: int | None = None,
    deterministic: bool | None = None,
    prefix_cache_tokens: int | None = None,
    device: torch.device | None = None,
) -> EngineMemory:
    """What a `LocalChatClient` with these settings takes on a GPU, beside the model's weights.

    `device`: where the engine will be; None: where the model is.
    """
    model = base_causal_lm(model)
    config = text_config(model)
    shape = kv_shape(model, config)
    where = device or shape.device
    context = context_tokens(max_context_tokens, config, where)
    slots = arena_bytes(shape, max_slots, context, single_length=not deterministic)
    if prefix_cache_tokens is None:
        prefix_cache_tokens = cache_tokens(shape, where)
    step = _step_bytes(shape, config, max_slots, context)
    return EngineMemory(slots, prefix_cache_tokens * shape.bytes_per_token, step)


def _step_bytes(shape: KVShape, config: Any, max_slots: int, context: int) -> int:
    """The widest layer of the largest prompt pass, its keys and its mask, and all logits."""
    tokens = min(MAX_TOKENS, max_slots * context)
    kv = shape.kv_heads * shape.head_dim
    queries = config.num_attention_heads * shape.head_dim
    inner = int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size)
    per_token = 6 * config.hidden_size + 3 * max(inner, queries) + 6 * kv
    mask = min(MAX_MASK, tokens * context * config.num_attention_heads // shape.kv_heads)
    rows = max(max_slots, _SCORED_ROWS)
    logits = rows * config.vocab_size * _BYTES_PER_LOGIT
    return int((tokens * per_token + 2 * mask) * shape.dtype.itemsize + logits)
