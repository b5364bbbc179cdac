"""Whether the engine computes what a module computes: tried when an engine is made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.local.arena import KVShape, SlotMemory
from ludic.inference.local.attention import AttentionCall
from ludic.inference.local.forward import Forward
from ludic.inference.local.slot_layout import SlotLayout

_TOKENS, _DECODED = 16, 2
"""How many tokens are compared, and how many of them are decoded: the second reads the first."""
_INSTEAD = "sample through a vLLM server (VLLMChatClient) instead"


def check_known_attention(model: nn.Module, config: Any) -> None:
    """Raises `ConfigError` for attention in chunks, which looks like any other until a sequence is
    longer than a chunk."""
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk or "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            f"{type(model).__name__} attends in chunks (attention_chunk_size={chunk}), which the "
            f"in-process engine does not: {_INSTEAD}"
        )


class _WatchedLayout:
    """Attends over slots as the engine does, and notes how often each layer asks."""

    def __init__(self, inner: SlotLayout, shape: KVShape) -> None:
        self.inner, self.shape = inner, shape
        self.calls: Counter[int] = Counter()

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] += 1
        found, wanted = tuple(call.k.shape[1:]), (self.shape.kv_heads, self.shape.head_dim)
        if found != wanted or call.v.shape != call.k.shape:
            raise ConfigError(
                f"layer {call.layer} has keys of shape {found}, its configuration says {wanted}: "
                f"the in-process engine does not know this family; {_INSTEAD}"
            )
        if self.calls[call.layer] > 1:
            raise ConfigError(
                f"layer {call.layer} attends more than once for one token, and the in-process "
                f"engine keeps one set of keys and values for each layer: {_INSTEAD}"
            )
        return self.inner.attend(call)


def check_same_logits(model: nn.Module, forward: Forward, shape: KVShape, max_tokens: int) -> None:
    """Runs a few tokens through the module and through the engine's slots: a prompt, then some
    tokens one by one. Sets `forward.direct` where that gives the same bits.

    A family whose layers do not attend through transformers' interface, or which attends or
    remembers in a way of its own, shows here, before it could sample from another distribution.
    """
    name = type(model).__name__
    vocab = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    count = min(_TOKENS, max_tokens)
    ids = torch.arange(1, count + 1, device=shape.device)[None] % vocab
    with torch.inference_mode():
        try:
            seen = through_slots(forward, ids, shape)
        except ConfigError as exc:
            raise ConfigError(f"{name}: {exc}") from exc
        except Exception as exc:
            raise ConfigError(
                f"{name} cannot be run by the in-process engine ({type(exc).__name__}: {exc}): it "
                "needs a causal LM that attends through transformers' AttentionInterface; "
                f"{_INSTEAD}"
            ) from exc
        wanted = model(input_ids=ids, use_cache=False).logits[0]
    finite = torch.isfinite(wanted)
    if not bool(finite.any()):
        return
    spread = wanted[finite].abs().max().item()
    gap = (seen - wanted)[finite].abs().max().item()
    allowed = (1e-3 if shape.dtype == torch.float32 else 0.1) * max(1.0, spread)
    if not gap <= allowed:  # a gap that is not a number is one, too
        raise ConfigError(
            f"{name}: the engine's logits differ from the module's by {gap:.3g}; it has a term "
            f"that the in-process engine does not know: {_INSTEAD}"
        )


def through_slots(forward: Forward, ids: Tensor, shape: KVShape) -> Tensor:
    """Logits [tokens, vocab], the last few by decoding."""
    count = ids.shape[1]
    prompt = max(1, count - _DECODED)
    memory = SlotMemory(shape, max_slots=1, max_tokens=count)
    arena = memory.arena(memory.length_for(count))
    positions = torch.arange(count, device=shape.device)[None]

    def step(first: int, end: int) -> Tensor:
        layout = SlotLayout(end - first, shape.device, exact=False)
        if end - first > 1:
            layout.add_chunk(arena, 0, 0, first, arena.length, end - first)
        else:
            layout.add_decodes(arena, [0], [0], [first])
        watched = _WatchedLayout(layout, shape)
        logits = forward(ids[:, first:end], positions[:, first:end], watched)
        if set(watched.calls) != set(range(shape.layers)):
            raise ConfigError(
                "it attends through transformers' AttentionInterface in layers "
                f"{sorted(watched.calls)} of {shape.layers}: the in-process engine does not know "
                f"it; {_INSTEAD}"
            )
        return logits

    logits = step(0, prompt)
    forward.direct = True
    try:
        forward.direct = torch.equal(step(0, prompt), logits)
    except Exception:  # whatever is odd about it, the whole module works
        forward.direct = False
    return torch.cat([logits, *(step(i, i + 1) for i in range(prompt, count))])
