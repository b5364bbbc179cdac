"""Key-value memory in fixed slots: no concatenation, ever.

An arena holds sequences of up to `length` tokens, one per slot. There is one arena for each power
of two, and a sequence that outgrows its slot moves to the next arena, which copies each token
O(log n) times in all. So a short sequence neither takes the memory nor pays the attention of a
long one. Occupied slots are kept dense (the last one moves into a hole), so that attention
reads a plain slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ludic.inference.local.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token keeps: for each layer, a key and a value for each key-value head."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class Arena:
    """Slots of one length. `kv` is [layers, 2, slots, kv_heads, length, head_dim]."""

    def __init__(self, shape: KVShape, length: int, capacity: int, max_capacity: int) -> None:
        self.shape, self.length, self.max_capacity = shape, length, max_capacity
        self.sequences: list[Sequence] = []
        self.kv = self._allocate(max(1, min(capacity, max_capacity)))
        self.generation = 0

    def _allocate(self, slots: int) -> Tensor:
        s = self.shape
        size = (s.layers, 2, slots, s.kv_heads, self.length, s.head_dim)
        # Zeros and not empty: a masked key still meets a product with zero, and must be finite.
        return torch.zeros(size, dtype=s.dtype, device=s.device)

    @property
    def capacity(self) -> int:
        return self.kv.shape[2]

    def add(self, sequence: Sequence) -> None:
        """Gives the sequence the next slot."""
        slot = len(self.sequences)
        self.generation += 1
        if slot == self.capacity:
            grown = self._allocate(min(2 * self.capacity, self.max_capacity))
            grown[:, :, :slot] = self.kv
            self.kv = grown
        self.sequences.append(sequence)
        sequence.arena, sequence.slot = self, slot

    def remove(self, sequence: Sequence, *, wipe: bool = False) -> Sequence | None:
        """Frees the slot. Answers the sequence that moved into it, or None.

        `wipe` clears what was there: values that are not finite must not meet the next tenant.
        """
        slot, last = sequence.slot, len(self.sequences) - 1
        self.generation += 1
        mover = self.sequences.pop()
        if mover is not sequence:
            n = mover.computed
            self.kv[:, :, slot, :, :n] = self.kv[:, :, last, :, :n]
            self.sequences[slot] = mover
            mover.slot = slot
        if wipe:
            if mover is not sequence:
                self.kv[:, :, slot, :, mover.computed :] = 0
            self.kv[:, :, last] = 0
        sequence.arena = None
        return mover if mover is not sequence else None

    def read(self, slot: int, tokens: int) -> Tensor:
        """The first `tokens` tokens of a slot: [layers, 2, kv_heads, tokens, head_dim]."""
        return self.kv[:, :, slot, :, :tokens]

    def write(self, slot: int, kv: Tensor) -> None:
        self.kv[:, :, slot, :, : kv.shape[3]] = kv


class SlotMemory:
    """All arenas of one engine. `single_length` makes one arena only, for CUDA graphs, whose
    addresses must not change."""

    def __init__(
        self,
        shape: KVShape,
        *,
        max_slots: int,
        max_tokens: int,
        smallest: int = 64,
        single_length: bool = False,
    ) -> None:
        self.shape, self.max_slots, self.max_tokens = shape, max_slots, max_tokens
        if single_length:
            lengths = [-(-max_tokens // 64) * 64]
        else:
            lengths = [smallest]
            while lengths[-1] < max_tokens:
                lengths.append(2 * lengths[-1])
        self.lengths = lengths
        self.single_length = single_length
        self._arenas: dict[int, Arena] = {}
        if single_length:
            # One slot more than can be taken: padding rows write there.
            self._arenas[lengths[0]] = Arena(shape, lengths[0], max_slots + 1, max_slots + 1)

    def length_for(self, tokens: int) -> int:
        """The length of the arena for a sequence of so many tokens."""
        return next(length for length in self.lengths if length >= tokens)

    def arena(self, length: int) -> Arena:
        if length not in self._arenas:
            self._arenas[length] = Arena(self.shape, length, 8, self.max_slots)
        return self._arenas[length]

    @property
    def only(self) -> Arena:
        return self._arenas[self.lengths[0]]

    def place(self, sequence: Sequence, tokens: int) -> None:
        """Sees to it that the sequence has a slot for `tokens` tokens, with what it holds."""
        length = self.length_for(tokens)
        old = sequence.arena
        if old is not None and old.length >= length:
            return
        kv = old.read(sequence.slot, sequence.computed) if old and sequence.computed else None
        old_slot = sequence.slot
        self.arena(length).add(sequence)
        if kv is not None:
            self.arena(length).write(sequence.slot, kv)
        if old is not None:
            new_arena, new_slot = sequence.arena, sequence.slot
            sequence.slot = old_slot
            old.remove(sequence)
            sequence.arena, sequence.slot = new_arena, new_slot

    def release(self, sequence: Sequence, *, wipe: bool = False) -> Sequence | None:
        if sequence.arena is None:
            return None
        return sequence.arena.remove(sequence, wipe=wipe)

    @property
    def generation(self) -> int:
        """Another number whenever a sequence came, left or moved."""
        return sum(a.generation for a in self._arenas.values())

    # The engine's thread may add an arena while another thread asks these two: hence the lists.

    @property
    def taken(self) -> int:
        return sum(len(a.sequences) for a in list(self._arenas.values()))

    @property
    def bytes(self) -> int:
        return sum(a.kv.numel() * a.kv.element_size() for a in list(self._arenas.values()))
