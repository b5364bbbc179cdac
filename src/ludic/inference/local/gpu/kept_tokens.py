"""Keys and values kept from finished sequences, token by token in one block of device memory.

Many sequences end, or start, in one step. Their keys and values are copied together, in either
direction, because a launch takes as long as copying a short prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.inference.local.arena import Arena, to_device
from ludic.memory.engine import FIRST_TOKENS

Places: TypeAlias = NDArray[np.int64]
"""Where in the block a sequence's tokens are, in their order."""

_BYTES_AT_ONCE = 64 << 20
"""How much is copied at once: what passes between the two memories is held a third time."""


class KeptTokens:
    """A block that grows with what it holds, up to `max_tokens`. Whoever takes places keeps within
    that number (`PrefixStore` does)."""

    def __init__(self, arena: Arena, max_tokens: int) -> None:
        self.arena, self.max_tokens = arena, max_tokens
        self.kv: Tensor | None = None
        """[tokens, layers, 2, kv_heads, head_dim]"""
        self._free = np.empty(max_tokens, dtype=np.int64)
        self._free_count = 0
        self._to_write: dict[int, tuple[int, Places]] = {}

    @property
    def room(self) -> int:
        """How many tokens it holds without growing."""
        return 0 if self.kv is None else len(self.kv)

    def keep(self, slot: int, tokens: int) -> Places:
        """Places for the first `tokens` tokens of a slot; `write` copies them there."""
        while self._free_count < tokens:
            self._grow()
        self._free_count -= tokens
        places = self._free[self._free_count : self._free_count + tokens].copy()
        self._to_write[id(places)] = slot, places
        return places

    def drop(self, places: Places) -> None:
        """Frees the places, also of what was not written yet."""
        self._to_write.pop(id(places), None)
        self._free[self._free_count : self._free_count + len(places)] = places
        self._free_count += len(places)

    def write(self) -> None:
        """Copies all that `keep` was called for. The slots must not have changed since then."""
        pairs, self._to_write = list(self._to_write.values()), {}
        assert self.kv is not None or not pairs
        for slots, positions, places in self._parts(pairs):
            self.kv[places] = self.arena.kv[:, :, slots, :, positions]  # type: ignore[index]

    def read(self, pairs: Sequence[tuple[int, Places]]) -> None:
        """Copies the tokens at these places to the beginning of these slots."""
        assert self.kv is not None or not pairs
        for slots, positions, places in self._parts(pairs):
            self.arena.kv[:, :, slots, :, positions] = self.kv[places]  # type: ignore[index]

    def _parts(self, pairs: Sequence[tuple[int, Places]]) -> list[Tensor]:
        """Slot, position and place of every token, [3, tokens], in parts."""
        if not pairs:
            return []
        slots, places = zip(*pairs, strict=True)
        counts = [len(p) for p in places]
        table = np.stack(
            [
                np.repeat(np.array(slots), counts),
                np.concatenate([np.arange(n) for n in counts]),
                np.concatenate(places),
            ]
        )
        at_once = max(1, _BYTES_AT_ONCE // self.arena.shape.bytes_per_token)
        return list(torch.split(to_device(table, self.arena.kv.device), at_once, dim=1))

    def _grow(self) -> None:
        """Twice as large, or as large as it may be."""
        old, new = self.room, min(max(2 * self.room, FIRST_TOKENS), self.max_tokens)
        if new == old:
            raise ValueError(f"more than {new} tokens are kept")
        layers, two, _, heads, _, dim = self.arena.kv.shape
        grown = self.arena.kv.new_empty(new, layers, two, heads, dim)
        if self.kv is not None:
            grown[:old] = self.kv
        self.kv = grown
        self._free[self._free_count : self._free_count + new - old] = np.arange(old, new)
        self._free_count += new - old
