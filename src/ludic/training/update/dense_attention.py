"""Attention within packed sequences by torch's ordinary attention, in every type and on every
device: one sequence after another, or sequences of similar length together.

A sequence may have more keys than queries; its queries are then its last tokens. Padding follows a
sequence, where causal attention never looks. So the padded result is exact, and padding gets and
gives no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

_ALONE = 1024
"""A sequence that is longer keeps a device busy by itself, and padding would cost more."""


class Bucket:
    """Sequences that are computed together: where each of their queries and keys is among all of
    them, laid end to end, and, behind a sequence's end, its last one again."""

    def __init__(self, queries: _Padded, keys: _Padded, device: torch.device) -> None:
        self.queries, self.keys = queries.places.to(device), keys.places.to(device)
        self.offsets = keys.lengths - queries.lengths
        self.lengths = queries.lengths
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def mask(
        self, window: int, dtype: torch.dtype
    ) -> Float[Tensor, "sequences 1 longest keys"] | None:
        """What each query sees, as a term for its scores; None where one rule says it for all."""
        if len(self.lengths) == 1 or not self.offsets.any():
            return None
        if (window, dtype) not in self._masks:
            column = torch.arange(self.queries.shape[1])
            last = self.offsets[:, None] + torch.minimum(column, self.lengths[:, None] - 1)
            last = last.to(self.keys.device)[:, None, :, None]
            self._masks[window, dtype] = _term(last, self.keys.shape[1], window, dtype)
        return self._masks[window, dtype]


class _Padded:
    """Some of the sequences, padded to the longest of them."""

    def __init__(self, lengths: Sequence[int], members: Sequence[int]) -> None:
        everyone = torch.tensor(lengths)
        self.lengths = everyone[members]
        self.column = torch.arange(int(self.lengths.max()))
        first = (everyone.cumsum(0) - everyone)[members]
        self.places = first[:, None] + torch.minimum(self.column, self.lengths[:, None] - 1)


class SequenceLengths:
    """The lengths of packed sequences, and of what each attends to where that is more. What follows
    from them is made once, for all layers."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, key_lengths: Sequence[int] | None = None
    ) -> None:
        self.lengths, self.device = list(lengths), device
        self.key_lengths = self.lengths if key_lengths is None else list(key_lengths)
        self._masks: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def mask(self, own: int, keys: int, window: int, dtype: torch.dtype) -> Tensor | None:
        """What the last `own` of `keys` tokens see, as a term for their scores; None where all are
        asked, and where it would be large."""
        if own == keys or keys > _ALONE:
            return None
        kind = own, keys, window, dtype
        if kind not in self._masks:
            last = torch.arange(keys - own, keys, device=self.device)[:, None]
            self._masks[kind] = _term(last, keys, window, dtype)
        return self._masks[kind]

    @cached_property
    def buckets(self) -> tuple[list[Bucket], Int[Tensor, " length"]]:
        """Sequences of like length together. And the way back: where each token of the packed row
        is in the buckets' results, laid end to end."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (own, whole) in enumerate(zip(self.lengths, self.key_lengths, strict=True)):
            width = _bucket_width(whole, index)
            groups.setdefault((width, min(_bucket_width(own, index), width)), []).append(index)
        found, back, before = [], torch.empty(sum(self.lengths), dtype=torch.long), 0
        for members in groups.values():
            queries, keys = (_Padded(n, members) for n in (self.lengths, self.key_lengths))
            real = queries.column < queries.lengths[:, None]
            flat = before + torch.arange(queries.places.numel()).view_as(queries.places)
            back[queries.places[real]] = flat[real]
            before += queries.places.numel()
            found.append(Bucket(queries, keys, self.device))
        return found, back.to(self.device)


def _bucket_width(length: int, index: int) -> int:
    """Lengths with one result are padded to the longest of them: up to the next power of two, or
    the middle between two. A long sequence has a result of its own, below zero."""
    if length > _ALONE:
        return -1 - index
    width = 16
    while width < length:
        if length <= width + width // 2:
            return width + width // 2
        width *= 2
    return width


def one_by_one(
    query: Float[Tensor, "1 heads length width"],
    key: Float[Tensor, "1 key_heads keys width"],
    value: Float[Tensor, "1 key_heads keys value_width"],
    lengths: SequenceLengths,
    scale: float | None,
    window: int,
) -> Float[Tensor, "1 length heads value_width"]:
    """One call for each sequence: the fastest on a CPU."""
    # Splitting, unlike slicing, has a backward pass that costs no more than the tokens it holds.
    queries = torch.split(query, lengths.lengths, 2)
    keys, values = (torch.split(t, lengths.key_lengths, 2) for t in (key, value))
    parts = []
    for q, k, v in zip(queries, keys, values, strict=True):
        mask = lengths.mask(q.shape[2], k.shape[2], window, q.dtype)
        parts.append(_attend(q, k, v, scale, window, mask))
    return torch.cat(parts, dim=2).transpose(1, 2)


def in_buckets(
    query: Float[Tensor, "1 heads length width"],
    key: Float[Tensor, "1 key_heads keys width"],
    value: Float[Tensor, "1 key_heads keys value_width"],
    lengths: SequenceLengths,
    scale: float | None,
    window: int,
) -> Float[Tensor, "1 length heads value_width"]:
    """One call for each bucket of like lengths: launches are what short sequences cost a GPU."""
    groups = query.shape[1] // key.shape[1]
    rows = [t[0].transpose(0, 1) for t in (query, key, value)]
    buckets, back = lengths.buckets
    parts = []
    for bucket in buckets:
        q, k, v = (
            row.index_select(0, places.flatten()).view(*places.shape, *row.shape[1:])
            for row, places in zip(rows, (bucket.queries, bucket.keys, bucket.keys), strict=True)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if groups > 1:  # the memory-efficient kernel, which computes in float32, wants equal heads
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        mask = bucket.mask(window, q.dtype)
        parts.append(_attend(q, k, v, scale, window, mask).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, back)[None]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int, mask: Tensor | None = None
) -> Tensor:
    """Causal attention over the last `window` tokens; 0: over all. Batch x heads x length x width,
    in and out. Without a mask the queries are the last tokens of every sequence."""
    length, keys = q.shape[2], k.shape[2]
    if mask is None and window and keys > window:
        mask = _seen(torch.arange(keys - length, keys, device=q.device)[:, None], keys, window)
    elif mask is None and length < keys:
        mask = causal_lower_right(length, keys)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _term(
    last: Int[Tensor, "*queries 1"], keys: int, window: int, dtype: torch.dtype
) -> Float[Tensor, "*queries keys"]:
    """`_seen` as what is added to scores, in rows as a GPU's kernel wants them aligned."""
    seen = _seen(last, -(-keys // 8) * 8, window)
    term = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return term.masked_fill_(~seen, -torch.inf)[..., :keys]


def _seen(last: Int[Tensor, "*queries 1"], keys: int, window: int) -> Bool[Tensor, "*queries keys"]:
    """Which keys each query sees; `last` is the last that it does."""
    gap = last - torch.arange(keys, device=last.device)
    return (gap >= 0) & (gap < window) if window else gap >= 0
