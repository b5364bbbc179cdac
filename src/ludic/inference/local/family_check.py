"""Checks that the engine computes what the module computes; runs whenever an engine is made.

A few tokens of ordinary text go through the engine's slots, and through the module in its own type
and in a wider one. The last two differ by rounding alone, so their distance says what rounding does
to this model and this text. The engine's distance from the wide one must not be much larger.

A short text cannot show a window longer than itself. There the check compares rules: the window
that the engine uses in a layer, and the mask of the module's own forward pass, are asked about
tokens as far apart as the context allows, without building a mask of that size.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.local.arena import KVShape, SlotMemory
from ludic.inference.local.attention import AttentionCall, SlotLayout
from ludic.inference.local.copies import WIDER, reference_logits, shared_copy
from ludic.inference.local.view import Forward

_NAME = "ludic_window_check"


class _Seen(NamedTuple):
    layer: int
    window: int | None
    rule: Callable[..., Any] | None


def check_windows(model: nn.Module, ids: Tensor, max_tokens: int) -> None:
    """Raises `ConfigError` where a layer's mask hides other tokens than the window it names.

    A layer whose mask does not come from transformers' mask interface is passed over.
    """
    for layer, window, rule in _windows(model, ids):
        if rule is None:
            continue
        for last in _places(max_tokens, window):
            keys = torch.arange(last + 1, device=ids.device)
            wanted = keys > last - (window or max_tokens)
            if not torch.equal(_visible(rule, last, keys), wanted):
                raise ConfigError(
                    f"layer {layer} names the window {window}, and its mask hides other tokens "
                    f"from token {last}: the in-process engine does not know this kind of "
                    f"attention; {_INSTEAD}"
                )


def _places(max_tokens: int, window: int | None) -> list[int]:
    """Where a window or chunks would show: the last tokens, and those at the window's edge."""
    places = {max_tokens - 1, max_tokens - 2}
    if window is not None:
        places |= {window - 1, window}
    return sorted(p for p in places if 0 <= p < max_tokens)


def _visible(rule: Callable[..., Any], last: int, keys: Tensor) -> Tensor:
    query = torch.full_like(keys[:1, None], last)
    visible = rule(torch.zeros_like(query), torch.zeros_like(query), query, keys[None])
    return torch.as_tensor(visible, dtype=torch.bool, device=keys.device).expand(1, len(keys))[0]


# By thread: two engines may be made at once.
_watched = threading.local()


def _mask(*args: Any, mask_function: Callable[..., Any], **options: Any) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    options |= {name: False for name in options if name.startswith("allow_is_")}
    mask: Tensor = sdpa_mask(*args, mask_function=mask_function, **options)
    _watched.masks.append((mask, mask_function))
    return mask


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    made_here = _watched.masks if attention_mask is not None else ()
    rule = next((rule for made, rule in made_here if made is attention_mask), None)
    _watched.layers.append(_Seen(module.layer_idx, sliding_window, rule))
    rows, heads = query.shape[2], query.shape[1]
    return value.new_zeros(query.shape[0], rows, heads, value.shape[-1]), None


def _windows(model: nn.Module, ids: Tensor) -> list[_Seen]:
    """What each layer is given and says, in one pass over a few tokens."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def watch(config: Any) -> None:
        config._attn_implementation = _NAME

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
    watched = shared_copy(model, watch)
    for module in watched.modules():
        module.training = False
    _watched.masks, _watched.layers = [], []
    try:
        watched(input_ids=ids, use_cache=False)
        layers: list[_Seen] = _watched.layers
    finally:
        del _watched.masks, _watched.layers
    return layers


_TOKENS, _DECODED = 16, 4
"""How many tokens are compared, and how many of them are decoded: the later read the earlier."""
_TEXT = "The weather was fine, so they walked down to the river and counted fourteen small boats."
_TIMES_ROUNDING = 3.0
"""How much farther than the module the engine may be from the wide logits. Two ways of computing
one thing round differently, but by as much; what is wrong moves logits farther."""
_NEGLIGIBLE = 1e-5
"""Of the logits' size: no missing term is as small, and some float32 kernels are no better."""
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
        shape, wanted = tuple(call.k.shape[1:]), (self.shape.kv_heads, self.shape.head_dim)
        if shape != wanted or call.v.shape != call.k.shape:
            raise ConfigError(
                f"layer {call.layer} has keys of shape {shape}, its configuration says {wanted}: "
                f"the in-process engine does not know this family; {_INSTEAD}"
            )
        if self.calls[call.layer] > 1:
            raise ConfigError(
                f"layer {call.layer} attends more than once for one token, and the in-process "
                f"engine keeps one set of keys and values for each layer: {_INSTEAD}"
            )
        return self.inner.attend(call)


def check_same_logits(
    model: nn.Module, forward: Forward, shape: KVShape, max_tokens: int, tokenizer: Any
) -> None:
    """Raises `ConfigError` when the engine's logits are not those of the module, by more than
    rounding explains. Sets `forward.direct` where that gives the same bits.

    A family whose layers do not attend through transformers' interface, or which attends or
    remembers in a way of its own, shows here, before it could sample from another distribution. A
    window longer than the text does not show in it: hence `check_windows`.
    """
    name = type(model).__name__
    vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    ids = torch.tensor([text_ids(tokenizer, vocab, min(_TOKENS, max_tokens))], device=shape.device)
    wide = WIDER.get(shape.dtype, torch.float32)
    with torch.inference_mode():
        try:
            logits = through_slots(forward, ids, shape)
            check_windows(model, ids[:, :2], max_tokens)
        except ConfigError as exc:
            raise ConfigError(f"{name}: {exc}") from exc
        except Exception as exc:
            raise ConfigError(
                f"{name} cannot be run by the in-process engine ({type(exc).__name__}: {exc}): it "
                "needs a causal LM that attends through transformers' AttentionInterface; "
                f"{_INSTEAD}"
            ) from exc
        plain = model(input_ids=ids, use_cache=False).logits[0]
        try:
            wanted = reference_logits(model, ids, wide)
        except Exception as exc:
            raise ConfigError(
                f"{name} cannot be run in {wide} ({type(exc).__name__}: {exc}), so what rounding "
                f"does to its logits is not known and the engine cannot be checked: {_INSTEAD}"
            ) from exc
    finite = torch.isfinite(wanted) & torch.isfinite(plain)

    def size(of: Tensor, rows: slice = slice(None)) -> float:
        """The root mean square of what is finite in the module."""
        chosen = of[rows][finite[rows]]
        return chosen.square().mean().sqrt().item() if len(chosen) else 0.0

    overall = size(plain - wanted)
    # Apart, since prompts and decoding go different ways and one of them may be wrong.
    prompt = max(1, ids.shape[1] - _DECODED)
    for rows in (slice(None, prompt), slice(prompt, None)):
        rounding = max(overall, size(plain - wanted, rows))
        gap = size(logits - wanted, rows)
        # A gap that is not a number is one, too.
        if not gap <= _TIMES_ROUNDING * rounding + _NEGLIGIBLE * size(wanted):
            raise ConfigError(
                f"{name}: the engine's logits differ from the module's by {gap:.3g}, and rounding "
                f"explains {rounding:.3g}; it has a term that the in-process engine does not know: "
                f"{_INSTEAD}"
            )


def text_ids(tokenizer: Any, vocab: int, count: int) -> list[int]:
    """Ordinary text in the model's tokens, or ids spread over the vocabulary. The lowest and the
    highest ids are often special tokens, on which a model's logits are mostly rounding."""
    try:
        ids = [int(i) for i in tokenizer.encode(_TEXT)][:count]
    except Exception:  # a tokenizer that only decodes is enough for the engine
        ids = []
    if len(ids) == count and all(0 <= i < vocab for i in ids):
        return ids
    return [(i + 1) * vocab // (count + 1) for i in range(count)]


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
