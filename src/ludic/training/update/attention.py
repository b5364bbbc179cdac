"""Attention within packed sequences, for every transformers model that lets it be chosen.

`enable_packed_attention` puts a function in front of the model's own attention: calls that carry
sequence boundaries go to a packed kernel, all others (a sampler's) to what was there before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.training.config import AttentionKind

PREFIX = "ludic_packed_"


class CannotPack(ConfigError):
    """A model whose attention has no packed form here."""


def enable_packed_attention(model: nn.Module, kind: AttentionKind = "auto") -> None:
    """Lets `model` take packed sequences. Doing it again only changes the kernel.

    Raises `CannotPack` for a model whose attention is not transformers' `AttentionInterface`.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if config is None or before is None or not getattr(model, "_supports_attention_backend", True):
        raise CannotPack("its attention does not go through transformers' AttentionInterface")
    before = _own_name(before)
    name = f"{PREFIX}{kind}:{before}"
    before = "sdpa" if before == "eager" else before  # the same numbers, but found by its name
    default = ALL_ATTENTION_FUNCTIONS[before]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if kwargs.get("cu_seq_lens_q") is None:
            return default(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        return packed_attention(module, query, key, value, kind=kind, **kwargs), None

    AttentionInterface.register(name, attention)
    if before in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    config._attn_implementation = name
    device = next(model.parameters()).device
    if device.type == "cuda" and kind in ("auto", "varlen"):
        _grouped_varlen_works(device)  # now, since it cannot be tried inside a compiled layer


def restore_attention(model: nn.Module) -> None:
    """Undoes `enable_packed_attention`, where it was done."""
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if name is not None and name.startswith(PREFIX):
        config._attn_implementation = _own_name(name)


def _own_name(name: str) -> str:
    """What an attention was called before it was put behind the packed one."""
    return name.removeprefix(PREFIX).split(":")[-1]


def packed_arguments(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """What a model's forward pass must be given for its sequences to stay apart.

    The mask is of a shape that fits nothing: only the packed attention, which ignores it, can
    run, so a model that lost it fails instead of attending across sequences.
    """
    return {
        "attention_mask": torch.ones(1, 1, 2, 3, dtype=torch.bool, device=cu_seqlens.device),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kind: AttentionKind,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Causal attention within each sequence. In: 1 x heads x length x width; out: transposed."""
    if softcap is not None or s_aux is not None:
        raise CannotPack(f"{type(module).__name__} has a soft cap or sinks")
    if dropout:
        raise ConfigError("packed attention has no dropout: set attention_dropout=0")
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    if kind == "auto":
        kind = "varlen" if query.is_cuda and narrow else "sdpa"
    elif kind == "varlen" and not narrow:
        raise ConfigError(
            f"attention='varlen' computes in bfloat16 and float16, not in {query.dtype}: load the "
            "model in one of them, or leave attention='auto'"
        )
    return _KERNELS[kind](
        query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window or 0
    )


def _per_sequence(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, scale: Any, window: int
) -> Tensor:
    """One sequence after another: right everywhere, fast nowhere but on a CPU."""
    # Splitting, unlike slicing, has a backward pass that costs no more than the tokens it holds.
    lengths = cu.diff().tolist()
    parts = []
    for q, k, v in zip(*(torch.split(t, lengths, 2) for t in (query, key, value)), strict=True):
        mask, length = None, q.shape[2]
        if window and length > window:
            place = torch.arange(length, device=q.device)
            gap = place[:, None] - place[None, :]
            mask = (gap >= 0) & (gap < window)
        parts.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


@cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, scale: Any, window: int
) -> Tensor:
    """torch's own kernel for sequences of different lengths."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and not _grouped_varlen_works(q.device):
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    return _call_varlen(q, k, v, cu, longest, scale, window).unsqueeze(0)


def _call_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float | None, window: int
) -> Tensor:
    """The call in the words of the torch that is installed; they differ between versions."""
    from torch.nn.attention.varlen import varlen_attn

    known, extra = _varlen_parameters(), {}
    if "window_size" in known:
        extra["window_size"] = (window - 1, 0) if window else (-1, 0)
    elif window:
        raise ConfigError("this torch has no packed attention with a window: update it")
    if "is_causal" in known:
        extra["is_causal"] = True  # type: ignore[assignment]
    if "enable_gqa" in known and q.shape[1] != k.shape[1]:
        extra["enable_gqa"] = True  # type: ignore[assignment]
    if "scale" in known:
        extra["scale"] = scale  # type: ignore[assignment]
    elif scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    return varlen_attn(q, k, v, cu, cu, longest, longest, **extra)  # type: ignore[arg-type, return-value]


@cache
def _grouped_varlen_works(device: torch.device) -> bool:
    """Whether the kernel takes fewer key heads than query heads; older ones do not say so.

    Seen by trying, forward and backward, since expanding the heads costs memory.
    """
    gen = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(48, heads, 64, device=device, dtype=torch.bfloat16, generator=gen)
        for heads in (4, 2, 2)
    )
    cu = torch.tensor([0, 16, 48], dtype=torch.int32, device=device)
    results = []
    for expand in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        keys, values = (
            t.repeat_interleave(2, dim=1) if expand else t for t in (leaves[1], leaves[2])
        )
        try:
            with torch.enable_grad():
                out = _call_varlen(leaves[0], keys, values, cu, 32, None, 0)
                (out * q).sum().backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError):
            return False
        results.append([out, *(leaf.grad for leaf in leaves)])
    return all(
        a is not None and b is not None and torch.allclose(a, b, rtol=0.05, atol=0.05)
        for a, b in zip(*results, strict=True)
    )


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "sdpa": _per_sequence,
    "varlen": _varlen,
}
