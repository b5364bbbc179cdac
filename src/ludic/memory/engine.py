"""What the in-process engine takes beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

from ludic.memory.shape import ModelShape

MAX_TOKENS = 32_768
"""The most tokens of one forward pass on a GPU."""
MAX_MASK = 1 << 28
"""The most elements of an attention mask: half a gigabyte in a half type. A prompt of 32,000
tokens within a window would need gigabytes at once."""
GPU_CONTEXT = 4096
"""The longest context on a GPU where no number is set: slots of a model's own would be too long."""
_CACHE_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
FIRST_TOKENS = 16_384
"""What the prefix cache of a GPU begins with; it doubles until it holds what ended."""
_SCORED_ROWS = 512
_BYTES_PER_LOGIT = 16
"""A logit in the model's type, in float32 and scaled, and what a sampler or a graph keeps of it."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine in the trainer's process. With `mixed` it has a rounded copy of the weights."""

    slots: int
    context: int
    deterministic: bool = False
    prefix_cache_tokens: int | None = None


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


def engine_bytes(shape: ModelShape, engine: Engine, *, item: int, device: str) -> EngineMemory:
    """What an engine takes with numbers of `item` bytes on a kind of device ("cpu" or "cuda")."""
    per_token, cached = shape.kv_numbers * item, engine.prefix_cache_tokens
    slots, context = engine.slots, engine.context
    return EngineMemory(
        slot_tokens(slots, context, single_length=not engine.deterministic) * per_token,
        (cache_tokens(per_token, device) if cached is None else cached) * per_token,
        _step_bytes(shape, slots, context, item),
    )


def cache_tokens(bytes_per_token: int, device: str) -> int:
    """How many tokens the prefix cache holds where no number is set."""
    return max(1, _CACHE_BYTES["cuda" if device == "cuda" else "cpu"] // bytes_per_token)


def grown_tokens(kept: float) -> int:
    """How many tokens the prefix cache has room for once it has held `kept`."""
    room = FIRST_TOKENS
    while room < kept:
        room *= 2
    return room


def default_context(positions: int, device: str) -> int:
    """The longest prompt plus completion where no number is set."""
    return min(positions, GPU_CONTEXT) if device == "cuda" else positions


def slot_lengths(context: int, *, single_length: bool) -> list[int]:
    """The lengths of the slots of an engine, in rising order."""
    if single_length:
        return [-(-context // 64) * 64]
    lengths = [64]
    while lengths[-1] < context:
        lengths.append(2 * lengths[-1])
    return lengths


def slot_tokens(slots: int, context: int, *, single_length: bool) -> int:
    """How many tokens all slots hold when every arena has grown to its full size; an engine with
    slots of one length has one more, where padding is written."""
    return sum(slot_lengths(context, single_length=single_length)) * (slots + single_length)


def _step_bytes(shape: ModelShape, slots: int, context: int, item: int) -> int:
    """The widest layer of the largest prompt pass, its keys and its mask, and all logits."""
    tokens = min(MAX_TOKENS, slots * context)
    per_token = 6 * shape.hidden + 3 * max(shape.inner, shape.queries) + 6 * shape.keys
    mask = min(MAX_MASK, tokens * context * shape.heads // shape.kv_heads)
    logits = max(slots, _SCORED_ROWS) * shape.vocab * _BYTES_PER_LOGIT
    return (tokens * per_token + 2 * mask) * item + logits
