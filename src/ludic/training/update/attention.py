"""Attention within packed sequences, for every transformers model whose attention can be chosen.

`PackedAttention` puts a function in front of the model's own attention: calls with sequence
boundaries go to a packed kernel, all others (a sampler's) to the original.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.training.config import AttentionKind
from ludic.training.update.dense_attention import SequenceLengths, in_buckets, one_by_one
from ludic.training.update.packing import SharedKeys, gather

PREFIX = "ludic_packed_"


class CannotPack(ConfigError):
    """A model whose attention has no packed form here."""


class PackedAttention:
    """One user's claim on a model that takes packed sequences, with the kernel it wants.

    Several may share a module: a trainer, and a reference that is its base. The model gets its own
    attention back once the last of them has let go.
    """

    def __init__(self, model: nn.Module, kind: AttentionKind = "auto") -> None:
        self.model, self.kind = model, kind

    def enable(self) -> None:
        """Lets the model take packed sequences; doing it again changes nothing. Raises `CannotPack`
        for one whose attention is not transformers' `AttentionInterface`."""
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config = getattr(self.model, "config", None)
        before = getattr(config, "_attn_implementation", None)
        supported = getattr(self.model, "_supports_attention_backend", True)
        if config is None or before is None or not supported:
            raise CannotPack("its attention does not go through transformers' AttentionInterface")
        before = before.removeprefix(PREFIX)
        name = PREFIX + before
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
            return packed_attention(module, query, key, value, **kwargs), None

        AttentionInterface.register(name, attention)
        if before in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
        config._attn_implementation = name
        _users.setdefault(self.model, WeakSet()).add(self)
        device = next(self.model.parameters()).device
        if device.type == "cuda" and self.kind in ("auto", "varlen"):
            _grouped_varlen_works(device)  # now, since it cannot be tried inside a compiled layer

    def restore(self) -> None:
        """Gives the model its own attention back, unless somebody else still packs."""
        users = _users.get(self.model, WeakSet())
        users.discard(self)
        config: Any = getattr(self.model, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if not users and name is not None and name.startswith(PREFIX):
            config._attn_implementation = name.removeprefix(PREFIX)


_users: WeakKeyDictionary[nn.Module, WeakSet[PackedAttention]] = WeakKeyDictionary()


def forget_longer_rows(model: nn.Module) -> None:
    """Takes a "dynamic" rotary embedding, which stays as stretched as its longest row was, back to
    where it began; one that differs between kinds of layers, for each of them."""
    rotary: Any
    for rotary in model.modules():
        kinds = getattr(rotary, "rope_type", None)
        by_prefix = (
            {f"{layer}_": kind for layer, kind in kinds.items()}
            if isinstance(kinds, dict)
            else {"": kinds}
        )
        for prefix, kind in by_prefix.items():
            if kind == "dynamic":
                original = getattr(rotary, f"{prefix}original_inv_freq")
                device = getattr(rotary, f"{prefix}inv_freq").device
                setattr(rotary, f"{prefix}inv_freq", original.to(device))
                setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def rope_threshold(facts: Mapping[str, Any]) -> int:
    """The length above which the rotary embedding changes."""
    rope = facts.get("rope_parameters") or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    lengths = [sys.maxsize]
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            lengths.append(kind["original_max_position_embeddings"])
        elif kind.get("rope_type") == "dynamic":
            lengths.append(facts["max_position_embeddings"])
    return min(lengths)


def packed_arguments(
    cu_seqlens: Tensor,
    lengths: Sequence[int],
    keys: SharedKeys | None = None,
    *,
    kind: AttentionKind = "auto",
) -> dict[str, Any]:
    """What a model's forward pass must be given for its sequences to stay apart: their boundaries,
    and their lengths on the host, so that no layer has to ask the device; and what they attend to,
    if that is more than themselves. The kernel is chosen per call, because another caller that
    packs the same model may want a different one.

    The mask is of a shape that fits nothing: only the packed attention, which ignores it, can
    run, so a model that lost it fails instead of attending across sequences.
    """
    seen, most, places = cu_seqlens, lengths, None
    if keys is not None:
        seen, most, places = keys.cu_seqlens, keys.lengths, keys.places
    return {
        "attention_mask": torch.ones(1, 1, 2, 3, dtype=torch.bool, device=cu_seqlens.device),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": seen,
        "max_length_q": max(lengths),
        "max_length_k": max(most),
        "ludic_lengths": SequenceLengths(lengths, cu_seqlens.device, most),
        "ludic_places": places,
        "ludic_kind": kind,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ludic_lengths: SequenceLengths | None = None,
    ludic_places: Tensor | None = None,
    ludic_kind: AttentionKind = "auto",
    **_: Any,
) -> Tensor:
    """Causal attention within each sequence. In: 1 x heads x length x width; out: transposed.

    With `ludic_places`, keys and values are taken from there, sequence after sequence.
    """
    if softcap is not None or s_aux is not None:
        raise CannotPack(f"{type(module).__name__} has a soft cap or sinks")
    if dropout:  # `Policy` packs nothing while a layer that it knows of drops units
        raise ConfigError("packed attention has no dropout: set attention_dropout=0")
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings in float32 leave queries and keys in it.
        narrowed = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(narrowed) for t in (query, key, value))
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    kind = ludic_kind
    if kind == "auto":
        kind = "varlen" if query.is_cuda and narrow else "sdpa"
    elif kind == "varlen" and not narrow:
        raise ConfigError(
            f"attention='varlen' computes in bfloat16 and float16, not in {query.dtype}: load the "
            "model in one of them, or leave attention='auto'"
        )
    if ludic_places is not None:
        key, value = (_at(t, ludic_places) for t in (key, value))
    if kind == "varlen":
        bounds = _Bounds(
            cu_seq_lens_q,
            max_length_q,
            cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k,
            max_length_k or max_length_q,
        )
        return _varlen(query, key, value, bounds, scaling, sliding_window or 0)
    lengths = ludic_lengths or SequenceLengths(cu_seq_lens_q.diff().tolist(), query.device)
    by = in_buckets if query.is_cuda else one_by_one
    return by(query, key, value, lengths, scaling, sliding_window or 0)


def _at(heads: Tensor, places: Tensor) -> Tensor:
    """Keys or values at `places`: 1 x heads x length x width, in and out."""
    return gather(heads[0].transpose(0, 1), places).transpose(0, 1)[None]


class _Bounds(NamedTuple):
    """Where sequences begin and end among the queries and among the keys, and the longest."""

    queries: Tensor
    most_queries: int
    keys: Tensor
    most_keys: int


@cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: _Bounds, scale: Any, window: int
) -> Tensor:
    """torch's own kernel for sequences of different lengths."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and not _grouped_varlen_works(q.device):
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    return _call_varlen(q, k, v, bounds, scale, window).unsqueeze(0)


def _call_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: _Bounds, scale: float | None, window: int
) -> Tensor:
    """The call in the words of the torch that is installed; they differ between versions. Fewer
    queries than keys are the last tokens of their sequence."""
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
    return varlen_attn(  # type: ignore[return-value]
        q,
        k,
        v,
        bounds.queries,
        bounds.keys,
        bounds.most_queries,
        bounds.most_keys,
        **extra,  # type: ignore[arg-type]
    )


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
                out = _call_varlen(leaves[0], keys, values, _Bounds(cu, 32, cu, 32), None, 0)
                (out * q).sum().backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError):
            return False
        results.append([out, *(leaf.grad for leaf in leaves)])
    return all(
        a is not None and b is not None and torch.allclose(a, b, rtol=0.05, atol=0.05)
        for a, b in zip(*results, strict=True)
    )
