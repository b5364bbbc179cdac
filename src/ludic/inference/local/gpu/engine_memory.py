"""How much of a device's memory an engine will take, before there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ludic.inference.local.arena import KVShape, arena_bytes
from ludic.inference.local.attention import MAX_MASK
from ludic.inference.local.gpu.prefill import MAX_TOKENS
from ludic.inference.local.module.base_model import base_causal_lm
from ludic.inference.local.sizes import cache_tokens, context_tokens, kv_shape, text_config

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
