"""Attention over slots, called by the Hugging Face layers in place of their own.

A step is a flat row of tokens, [1, rows], from any number of sequences. The layers compute each row
independently; only attention knows which sequence a row belongs to. A `Layout` writes the rows'
keys and values into their slots and lets every row read its own sequence. `SlotLayout` is the
layout of a step with any mixture of work: decode rows and chunks of prompts.

In the exact form each row is an attention problem of its own: one query token against the slot's
first `length` tokens, where `length` depends only on the row's position. So a key has the same bits
whether computed in a prompt or while decoding, and neither depends on the other rows.
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
from ludic.memory.engine import MAX_MASK

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


# By thread: the trainer may run its own module in another one while the engine steps.
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
    """The function registered with transformers; `query` is [1, heads, rows, dim].

    The mask is the single element that `Forward` passes, unless a layer makes another one.
    """
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} asks for soft-capped or sink attention, which the in-process "
            "engine does not have: sample through a vLLM server"
        )
    if attention_mask is not None and attention_mask.numel() > 1:
        raise ConfigError(
            f"{type(module).__name__} adds a mask or a bias that it makes itself, which the "
            "in-process engine does not know: sample through a vLLM server"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = current_layout().attend(AttentionCall(module.layer_idx, q, k, v, scale, sliding_window))
    return out.unsqueeze(0), None


def register() -> None:
    """Makes the attention known to transformers, under a name that only module views use."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slot_attention)


class Masks:
    """The additive masks of one step, each made when a layer first asks for it: layers differ in
    their window. `positions` is [n, width], over keys at 0 to `length` - 1."""

    def __init__(self, positions: Tensor, length: int) -> None:
        self.positions, self.length = positions, length
        self._made: dict[int | None, Tensor] = {}

    def get(self, window: int | None, q: Tensor, kv_heads: int) -> Tensor:
        """[n, 1, rows, length] for `grouped_attention` of the queries `q`."""
        if window not in self._made:
            at = torch.arange(self.length, device=q.device)
            hidden = at > self.positions[:, :, None]
            if window is not None:
                hidden |= at <= self.positions[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
            mask.masked_fill_(hidden, NEG_INF)
            if self.positions.shape[1] > 1:
                mask = mask.repeat(1, q.shape[-2] // kv_heads, 1)
            self._made[window] = mask[:, None]
        return self._made[window]

    def next_token(self) -> None:
        """Every position goes on by one; only where the width is one."""
        self.positions.add_(1)
        full = self._made.pop(None, None)
        self._made.clear()
        if full is not None:
            full[:, 0, 0].scatter_(1, self.positions, 0.0)
            self._made[None] = full


def grouped_attention(
    q: Tensor, keys: Tensor, values: Tensor, masks: Masks, scale: float, window: int | None
) -> Tensor:
    """n sequences by `width` queries each, q [n * width, heads, dim], over keys and values
    [n, kv_heads, length, dim]. The queries that share a key-value head are rows of one problem.

    Where their mask would be too large, they are a problem for each of several runs of tokens."""
    (n, width), (heads, dim), kv_heads = masks.positions.shape, q.shape[1:], keys.shape[1]
    most = max(1, MAX_MASK // (n * masks.length * (heads // kv_heads)))
    if width > most:
        by_sequence = q.reshape(n, width, heads, dim)
        parts = []
        for first in range(0, width, most):
            tokens = slice(first, first + most)
            part = Masks(masks.positions[:, tokens], masks.length)
            rows = by_sequence[:, tokens].reshape(-1, heads, dim)
            out = grouped_attention(rows, keys, values, part, scale, window)
            parts.append(out.view(n, -1, heads, dim))
        return torch.cat(parts, 1).flatten(0, 1)
    mask = masks.get(window, q, kv_heads)
    if width == 1:
        rows = q.reshape(n, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        return out.flatten(1, 2)
    rows = q.reshape(n, width, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    out = F.scaled_dot_product_attention(
        rows.reshape(n, kv_heads, -1, dim), keys, values, attn_mask=mask, scale=scale
    )
    out = out.view(n, kv_heads, heads // kv_heads, width, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(n * width, heads, dim)


@dataclass(slots=True)
class _DecodeGroup:
    """One arena's sequences, each with at most one row: attention over the dense slots.

    Row `row_of_slot[i]` belongs to slot i. When rows and slots run in parallel, `span` is their
    slice and nothing has to be gathered.
    """

    arena: Arena
    all_slots: Tensor
    span: slice | None
    rows: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    masks: Masks

    def attend(self, call: AttentionCall) -> Tensor:
        """What each slot's query found: [slots, heads, dim]."""
        keys, values = self.arena.kv[call.layer]
        n, positions = len(self.all_slots), self.masks.positions[:, 0]
        if self.span is not None:
            where = (self.all_slots, slice(None), positions)
            keys[where], values[where] = call.k[self.span], call.v[self.span]
            q = call.q[self.span]
        else:
            where = (self.slot_of_row, slice(None), positions[self.slot_of_row])
            keys[where], values[where] = call.k[self.rows], call.v[self.rows]
            q = call.q[self.row_of_slot]
        return grouped_attention(q, keys[:n], values[:n], self.masks, call.scale, call.window)


@dataclass(slots=True)
class _Chunk:
    """Consecutive tokens of one sequence, over the first `masks.length` tokens of its slot."""

    arena: Arena
    slot: int
    rows: slice
    positions: Tensor
    masks: Masks

    def store(self, call: AttentionCall) -> None:
        for cache, new in zip(self.arena.kv[call.layer], (call.k, call.v), strict=True):
            cache[self.slot].index_copy_(1, self.positions, new[self.rows].transpose(0, 1))

    def attend(self, call: AttentionCall) -> Tensor:
        """[rows, heads, dim]: one problem for the chunk; in the exact layout, one for each row."""
        kv = self.arena.kv[call.layer, :, self.slot, None, :, : self.masks.length]
        keys, values = kv.expand(2, len(self.masks.positions), -1, -1, -1)
        q = call.q[self.rows]
        return grouped_attention(q, keys, values, self.masks, call.scale, call.window)


class SlotLayout:
    """Decode rows arena by arena, prompt chunks sequence by sequence."""

    def __init__(self, rows: int, device: torch.device, *, exact: bool) -> None:
        self.rows, self.device, self.exact = rows, device, exact
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
                torch.arange(n, device=self.device),
                slice(rows[0], rows[0] + n) if parallel else None,
                self._index(rows),
                self._index(slots),
                self._index(row_of_slot),
                Masks(self._index(positions)[:, None], arena.length),
            )
        )

    def add_chunk(
        self, arena: Arena, slot: int, row: int, position: int, length: int, count: int
    ) -> None:
        """`count` rows from `row` on, the tokens of one slot from `position` on."""
        at = torch.arange(position, position + count, device=self.device)
        masks = Masks(at[:, None] if self.exact else at[None], length)
        self.chunks.append(_Chunk(arena, slot, slice(row, row + count), at, masks))

    def next_token(self) -> None:
        """Every sequence goes on by one token, in the same row and slot."""
        for group in self.decodes:
            group.masks.next_token()

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def attend(self, call: AttentionCall) -> Tensor:
        if call.rotary is not None:
            q, k = rotate(call.q, call.rotary), rotate(call.k, call.rotary)
            call = call._replace(q=q, k=k, rotary=None)
        alone = len(self.decodes) == 1 and not self.chunks
        if alone and len(self.decodes[0].all_slots) == self.rows:
            return self.decodes[0].attend(call)
        out = torch.zeros_like(call.q)
        # All are stored before any is read: two chunks may be of one sequence.
        for chunk in self.chunks:
            chunk.store(call)
        for chunk in self.chunks:
            out[chunk.rows] = chunk.attend(call)
        for group in self.decodes:
            attended = group.attend(call)
            if group.span is not None:
                out[group.span] = attended
            else:
                out[group.rows] = attended[group.slot_of_row]
        return out
