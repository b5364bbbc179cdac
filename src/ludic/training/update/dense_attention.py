"""Attention within packed sequences by torch's ordinary attention, in every type and on every
device: one sequence after another, or those of like length together.

Padding stands behind a sequence, where no token of it looks: attention is causal. So the padded
result is exact, and padding gets and gives no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_ALONE = 1024
"""A sequence that is longer keeps a device busy by itself, and padding would cost more."""


class SequenceLengths:
    """The lengths of packed sequences. What follows from them is made once, for all layers."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = list(lengths), device

    @cached_property
    def buckets(self) -> tuple[list[Int[Tensor, "sequences longest"]], Int[Tensor, " length"]]:
        """Sequences that are computed together: where each of their tokens is in the packed row
        and, behind a sequence's end, its last one again. And the way back: where each token of the
        packed row is in the buckets' results, laid end to end."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(self.lengths):
            groups.setdefault(_bucket_width(length, index), []).append(index)
        found, back, before = [], torch.empty(int(starts[-1]), dtype=torch.long), 0
        for members in groups.values():
            lengths = torch.tensor([self.lengths[i] for i in members])
            first = starts[members]
            width = int(lengths.max())
            column = torch.arange(width)
            places = first[:, None] + torch.minimum(column, lengths[:, None] - 1)
            real = column < lengths[:, None]
            flat = before + torch.arange(len(members) * width).view(-1, width)
            back[places[real]] = flat[real]
            before += len(members) * width
            found.append(places.to(self.device))
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
    key: Float[Tensor, "1 key_heads length width"],
    value: Float[Tensor, "1 key_heads length width"],
    lengths: SequenceLengths,
    scale: float | None,
    window: int,
) -> Float[Tensor, "1 length heads width"]:
    """One call for each sequence: the fastest on a CPU."""
    # Splitting, unlike slicing, has a backward pass that costs no more than the tokens it holds.
    split = (torch.split(t, lengths.lengths, 2) for t in (query, key, value))
    parts = [_attend(q, k, v, scale, window) for q, k, v in zip(*split, strict=True)]
    return torch.cat(parts, dim=2).transpose(1, 2)


def in_buckets(
    query: Float[Tensor, "1 heads length width"],
    key: Float[Tensor, "1 key_heads length width"],
    value: Float[Tensor, "1 key_heads length width"],
    lengths: SequenceLengths,
    scale: float | None,
    window: int,
) -> Float[Tensor, "1 length heads width"]:
    """One call for each bucket of like lengths: launches are what short sequences cost a GPU."""
    groups = query.shape[1] // key.shape[1]
    rows = [t[0].transpose(0, 1) for t in (query, key, value)]
    buckets, back = lengths.buckets
    parts = []
    for places in buckets:
        q, k, v = (
            row.index_select(0, places.flatten()).view(*places.shape, *row.shape[1:])
            for row in rows
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if groups > 1:  # the memory-efficient kernel, which computes in float32, wants equal heads
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        parts.append(_attend(q, k, v, scale, window).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, back)[None]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    """Causal attention over the last `window` tokens; 0: over all. Batch x heads x length x width,
    in and out."""
    mask, length = None, q.shape[2]
    if window and length > window:
        place = torch.arange(length, device=q.device)
        gap = place[:, None] - place[None, :]
        mask = (gap >= 0) & (gap < window)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
