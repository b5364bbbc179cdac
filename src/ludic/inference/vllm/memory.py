"""How much of a GPU a vLLM server takes when it shares it with a trainer. Only arithmetic, no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from ludic.errors import OutOfMemoryError
from ludic.memory.plan import GIB as GIB
from ludic.memory.shape import ModelShape

HEADROOM = 0.05
"""Of the GPU: for what neither side counts, such as CUDA graphs and the allocators' gaps."""
FIXED = 3 * GIB
"""What vLLM takes for any model: the CUDA context, workspaces, its compiled code, small graphs."""
PREFIXES = 4 * GIB
"""For prompts that come again, if there is room: the rest of the cache keeps them."""
BATCHED_TOKENS = 8192
"""How many tokens vLLM's server computes at once unless a flag says otherwise."""
_BYTES_PER_LOGIT = 16
"""A logit in float32, scaled, as a log-prob, and what the sampler keeps of it."""


@dataclass(frozen=True, slots=True)
class ServerNeed:
    """What a server needs of one GPU, in bytes: the weights and one step in any case, and a cache
    between that of one sequence and that of all slots, each at full length, with prompts that come
    again beside them."""

    weights: int
    step: int
    least_cache: int
    whole_cache: int

    @property
    def least(self) -> int:
        return self.weights + self.step + self.least_cache

    @property
    def wanted(self) -> int:
        return self.weights + self.step + self.whole_cache + PREFIXES


def server_need(
    facts: Mapping[str, Any] | ModelShape,
    *,
    weights: int,
    item: int,
    slots: int,
    context: int | None,
    batched_tokens: int | None = None,
    gpus: int = 1,
) -> ServerNeed | None:
    """Estimates it from a model's configuration, or from its sizes; None if it does not say them.
    `item` is the bytes of one weight or cached number, `context` the longest sequence (None: the
    model's), `gpus` how many the server is spread over."""
    shape = ModelShape.of(facts) if isinstance(facts, Mapping) else facts
    longest = context or (shape.positions if shape else None)
    if shape is None or longest is None:
        return None
    per_token = shape.kv_numbers * item
    tokens = batched_tokens or BATCHED_TOKENS
    activations = tokens * (6 * shape.hidden + 3 * shape.inner) * item
    logits = slots * shape.vocab * _BYTES_PER_LOGIT
    cache = longest * per_token
    return ServerNeed(
        weights=ceil(weights / gpus),
        step=FIXED + activations + logits,
        least_cache=ceil(cache / gpus),
        whole_cache=ceil(slots * cache / gpus),
    )


def share_beside_trainer(total: int, free: int, trainer: int, server: ServerNeed | None) -> float:
    """Returns the server's share of a GPU with `total` bytes, of which `free` are left and the
    trainer will take `trainer` more. The server gets what it wants as far as that leaves the
    trainer its own; one of unknown size gets half of the rest. Raises `OutOfMemoryError` if less
    than it needs is left."""
    room = free - trainer - int(HEADROOM * total)
    granted = room // 2 if server is None else min(server.wanted, room)
    if granted < (FIXED if server is None else server.least):
        needs = "" if server is None else f", and the vLLM server needs {_gib(server.least)}"
        raise OutOfMemoryError(
            f"{_gib(free)} of the GPU's {_gib(total)} are free; the trainer will take about "
            f"{_gib(trainer)}{needs}: lower training.micro_token_budget or "
            "inference.max_context_tokens, set training.gradient_checkpointing = true, or state "
            "the server's share as inference.vllm.gpu_memory"
        )
    return ceil(granted / total * 10_000) / 10_000


def _gib(count: int) -> str:
    return f"{max(count, 0) / GIB:.1f} GiB"
