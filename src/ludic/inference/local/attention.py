"""Attention over slots, called by the Hugging Face layers in place of their own.

A step is a flat row of tokens, [1, rows], from any number of sequences. The layers compute each
row by itself; only attention knows which sequence a row belongs to. It writes the rows' keys and
values into their slots and lets every row read its own sequence.

In the exact layout each row is an attention problem of its own, one query token against the slot's
first `length` tokens, with `length` set by the row's position alone. A key computed in a prompt is
then the same bits as one computed while decoding, and neither depends on the other rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.errors import ConfigError
from ludic.inference.local.arena import Arena

ATTENTION_NAME = "ludic_slots"
NEG_INF = float("-inf")

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, [rows, dim] each."""


class AttentionCall(NamedTuple):
    """What a layer asks for. q is [rows, heads, dim]; k and v are [rows, kv_heads, dim].

    With `rotary`, queries and keys come as projected, and whoever attends rotates them.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None = None
    rotary: Rotary | None = None


class Layout(Protocol):
    """How the rows of one step attend."""

    def attend(self, call: AttentionCall) -> Tensor: ...


_current = threading.local()


@contextmanager
def layout_in_use(layout: Layout) -> Iterator[None]:
    """Makes `layout` the one that attention calls of this thread go to."""
    _current.layout = layout
    try:
        yield
    finally:
        _current.layout = None


def current_layout() -> Layout:
    """The layout of the step that this thread is in."""
    layout: Layout | None = getattr(_current, "layout", None)
    if layout is None:
        raise RuntimeError("slot attention outside of an engine step")
    return layout


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """The half-split rotary embedding in plain torch: x is [rows, heads, dim]."""
    cos, sin = (part[:, None] for part in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers; `query` is [1, heads, rows, dim]."""
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} asks for soft-capped or sink attention, which the in-process "
            "engine does not have: sample through a vLLM server"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = current_layout().attend(AttentionCall(module.layer_idx, q, k, v, scale, sliding_window))
    return out.unsqueeze(0), None


def register() -> None:
    """Makes the attention known to transformers, under a name that only module views use."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slot_attention)


def additive_mask(positions: Tensor, length: int, dtype: torch.dtype, window: int | None) -> Tensor:
    """[n, 1, 1, length]: 0 for the keys that a query at each position may see, else -inf."""
    keys = torch.arange(length, device=positions.device)
    hidden = keys > positions[:, None]
    if window is not None:
        hidden |= keys <= positions[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, NEG_INF)[:, None, None, :]


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[n, heads, dim] to [n, kv_heads, heads per kv head, dim]: the queries that share a key."""
    n, heads, dim = q.shape
    return q.reshape(n, kv_heads, heads // kv_heads, dim)


@dataclass(slots=True)
class _DecodeGroup:
    """One arena's sequences, each with at most one row: attention over the dense slots.

    Row `row_of_slot[i]` belongs to slot i. When rows and slots run in parallel, `span` is their
    slice and nothing has to be gathered.
    """

    arena: Arena
    slots: int
    all_slots: Tensor
    positions: Tensor
    span: slice | None
    rows: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    masks: dict[int | None, Tensor]

    def mask(self, dtype: torch.dtype, window: int | None) -> Tensor:
        if window not in self.masks:
            self.masks[window] = additive_mask(self.positions, self.arena.length, dtype, window)
        return self.masks[window]


@dataclass(slots=True)
class _Chunk:
    """Consecutive tokens of one sequence: rows `start:end`, over the slot's first `length`."""

    arena: Arena
    slot: int
    start: int
    end: int
    length: int
    positions: Tensor
    masks: dict[int | None, Tensor]

    def mask(self, dtype: torch.dtype, window: int | None) -> Tensor:
        if window not in self.masks:
            self.masks[window] = additive_mask(self.positions, self.length, dtype, window)
        return self.masks[window]


class SlotLayout:
    """The eager layout: decode rows arena by arena, prompt chunks sequence by sequence."""

    def __init__(
        self, rows: int, kv_heads: int, dtype: torch.dtype, device: torch.device, *, exact: bool
    ) -> None:
        self.rows, self.kv_heads, self.dtype, self.device = rows, kv_heads, dtype, device
        self.exact = exact
        self.decodes: list[_DecodeGroup] = []
        self.chunks: list[_Chunk] = []

    def add_decodes(self, arena: Arena, rows: list[int], slots: list[int], at: list[int]) -> None:
        """Rows with the last token of a sequence each; slots without a row compute for nobody."""
        n = max(slots) + 1
        parallel = slots == list(range(n)) and rows == list(range(rows[0], rows[0] + n))
        row_of_slot, positions = [rows[0]] * n, [0] * n
        for row, slot, position in zip(rows, slots, at, strict=True):
            row_of_slot[slot], positions[slot] = row, position
        self.decodes.append(
            _DecodeGroup(
                arena,
                n,
                torch.arange(n, device=self.device),
                self._index(positions),
                slice(rows[0], rows[0] + n) if parallel else None,
                self._index(rows),
                self._index(slots),
                self._index(row_of_slot),
                {},
            )
        )

    def add_chunk(
        self, arena: Arena, slot: int, row: int, position: int, length: int, count: int
    ) -> None:
        """`count` rows from `row` on, the tokens of one slot from `position` on."""
        at = torch.arange(position, position + count, device=self.device)
        self.chunks.append(_Chunk(arena, slot, row, row + count, length, at, {}))

    def next_token(self) -> None:
        """Every sequence goes on by one token, in the same row and slot."""
        for group in self.decodes:
            group.positions.add_(1)
            full = group.masks.pop(None, None)
            group.masks.clear()
            if full is not None:
                full[:, 0, 0].scatter_(1, group.positions[:, None], 0.0)
                group.masks[None] = full

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def attend(self, call: AttentionCall) -> Tensor:
        layer, q, k, v, scale, window, rotary = call
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        queries = _grouped(q, self.kv_heads)
        if len(self.decodes) == 1 and not self.chunks and self.decodes[0].slots == self.rows:
            return self._attend_group(self.decodes[0], layer, queries, k, v, scale, window)
        out = torch.zeros_like(q)
        for chunk in self.chunks:
            keys, values = chunk.arena.kv[layer]
            rows = slice(chunk.start, chunk.end)
            keys[chunk.slot].index_copy_(1, chunk.positions, k[rows].transpose(0, 1))
            values[chunk.slot].index_copy_(1, chunk.positions, v[rows].transpose(0, 1))
        for chunk in self.chunks:
            keys, values = chunk.arena.kv[layer, :, chunk.slot, :, : chunk.length]
            rows = slice(chunk.start, chunk.end)
            mask = chunk.mask(self.dtype, window)
            out[rows] = self._attend_chunk(queries[rows], keys, values, mask, scale)
        for group in self.decodes:
            attended = self._attend_group(group, layer, queries, k, v, scale, window)
            if group.span is not None:
                out[group.span] = attended
            else:
                out[group.rows] = attended[group.slot_of_row]
        return out

    def _attend_group(
        self,
        group: _DecodeGroup,
        layer: int,
        queries: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        keys, values = group.arena.kv[layer]
        if group.span is not None:
            where = (group.all_slots, slice(None), group.positions)
            keys[where], values[where] = k[group.span], v[group.span]
            picked = queries[group.span]
        else:
            where = (group.slot_of_row, slice(None), group.positions[group.slot_of_row])
            keys[where], values[where] = k[group.rows], v[group.rows]
            picked = queries[group.row_of_slot]
        return F.scaled_dot_product_attention(
            picked,
            keys[: group.slots],
            values[: group.slots],
            attn_mask=group.mask(self.dtype, window),
            scale=scale,
        ).flatten(1, 2)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        n, kv_heads, group, dim = q.shape
        if self.exact:
            shape = (n, *k.shape)
            attended = F.scaled_dot_product_attention(
                q, k.expand(shape), v.expand(shape), attn_mask=mask, scale=scale
            )
            return attended.flatten(1, 2)
        # One problem for the chunk: the queries that share a key-value head are its rows.
        rows = q.permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, dim)
        full = mask[:, 0].permute(1, 0, 2).expand(group, n, -1).reshape(1, 1, group * n, -1)
        attended = F.scaled_dot_product_attention(
            rows, k[None], v[None], attn_mask=full, scale=scale
        )
        return attended.view(kv_heads, group, n, dim).permute(2, 0, 1, 3).flatten(1, 2)
