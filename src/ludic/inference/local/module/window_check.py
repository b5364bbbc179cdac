"""Whether the masks that a module makes hide what its layers' windows say.

The engine goes by the window that a layer names when it attends. The module's own forward pass goes
by its mask. A window longer than a short text shows in no logit, so the masks' rule is asked about
tokens as far apart as the context allows, without a mask of that size ever being made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.local.module.shared_copy import shared_copy

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
                    f"layer {layer} names the window {window}, and its "
                    f"mask hides other tokens from token {last}: the in-process engine does not "
                    "know this kind of attention; sample through a vLLM server (VLLMChatClient) "
                    "instead"
                )


def _places(max_tokens: int, window: int | None) -> list[int]:
    """Where a window or chunks would show: the last tokens, and those at the window's edge."""
    places = {max_tokens - 1, max_tokens - 2}
    if window is not None:
        places |= {window - 1, window}
    return sorted(p for p in places if 0 <= p < max_tokens)


def _visible(rule: Callable[..., Any], last: int, keys: Tensor) -> Tensor:
    query = torch.full_like(keys[:1, None], last)
    found = rule(torch.zeros_like(query), torch.zeros_like(query), query, keys[None])
    return torch.as_tensor(found, dtype=torch.bool, device=keys.device).expand(1, len(keys))[0]


# By thread: two engines may be made at once.
_watched = threading.local()


def _mask(*args: Any, mask_function: Callable[..., Any], **options: Any) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    options |= {name: False for name in options if name.startswith("allow_is_")}
    made: Tensor = sdpa_mask(*args, mask_function=mask_function, **options)
    _watched.masks.append((made, mask_function))
    return made


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
