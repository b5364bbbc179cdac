"""The layout of a step with any mixture of work: decode rows and chunks of prompts.

In the exact layout each row is an attention problem of its own, one query token against the slot's
first `length` tokens, with `length` set by the row's position alone. A key computed in a prompt is
then the same bits as one computed while decoding, and neither depends on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ludic.inference.local.arena import Arena
from ludic.inference.local.attention import AttentionCall, Masks, grouped_attention, rotate


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
