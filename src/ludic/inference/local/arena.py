"""Key-value memory in fixed slots, without concatenation.

An arena holds sequences of up to `length` tokens, one per slot. There is one arena per power of
two, and a sequence that outgrows its slot moves to the next arena, which copies each token O(log n)
times in all. So a short sequence pays neither the memory nor the attention of a long one. Occupied
slots are kept dense (the last one moves into a hole), so that attention reads a plain slice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.memory.engine import slot_lengths


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | NDArray[Any],
    device: torch.device,
    dtype: torch.dtype = torch.long,
) -> Tensor:
    """The values as a tensor; on a GPU without waiting for the copy, or for the work before it."""
    host = torch.as_tensor(values, dtype=dtype)
    return host if device.type != "cuda" else host.pin_memory().to(device, non_blocking=True)


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


class Tenant(msgspec.Struct, eq=False, kw_only=True):
    """Whoever has a slot: where it is, and how many tokens are computed there."""

    arena: Arena | None = None
    slot: int = -1
    computed: int = 0


class Arena:
    """Slots of one length. `kv` is [layers, 2, slots, kv_heads, length, head_dim]."""

    def __init__(self, shape: KVShape, length: int, capacity: int, max_capacity: int) -> None:
        self.shape, self.length, self.max_capacity = shape, length, max_capacity
        self.tenants: list[Tenant] = []
        self.kv = self._allocate(min(capacity, max_capacity))

    def _allocate(self, slots: int) -> Tensor:
        s = self.shape
        size = (s.layers, 2, slots, s.kv_heads, self.length, s.head_dim)
        # Zeros and not empty: a masked key still meets a product with zero, and must be finite.
        return torch.zeros(size, dtype=s.dtype, device=s.device)

    def add(self, tenant: Tenant) -> None:
        """Gives the tenant the next slot."""
        slot, capacity = len(self.tenants), self.kv.shape[2]
        if slot == capacity:
            grown = self._allocate(min(2 * capacity, self.max_capacity))
            grown[:, :, :slot] = self.kv
            self.kv = grown
        self.tenants.append(tenant)
        tenant.arena, tenant.slot = self, slot

    def free(self, slots: Sequence[int], *, wipe: bool = False) -> list[tuple[int, int]]:
        """Frees these slots, into which the last tenants move, with one copy for all of them.
        Returns the moves: from which slot, to which.

        `wipe` clears what was there: values that are not finite must not meet the next tenant.
        """
        before = len(self.tenants)
        if wipe:
            self.kv[:, :, to_device(slots, self.kv.device)] = 0
        came_from: dict[int, int] = {}
        for slot in sorted(slots, reverse=True):
            last = len(self.tenants) - 1
            mover = self.tenants.pop()
            origin = came_from.pop(last, last)
            if slot != last:
                self.tenants[slot], mover.slot = mover, slot
                came_from[slot] = origin
        if came_from:
            longest = max(self.tenants[slot].computed for slot in came_from)
            moves = [list(came_from.values()), list(came_from)]
            sources, targets = to_device(moves, self.kv.device)
            self.kv[:, :, targets, :, :longest] = self.kv[:, :, sources, :, :longest]
        if wipe:  # those that moved may have left such values, too
            self.kv[:, :, len(self.tenants) : before] = 0
        return [(source, target) for target, source in came_from.items()]

    def read(self, slot: int, tokens: int) -> Tensor:
        """The first `tokens` tokens of a slot: [layers, 2, kv_heads, tokens, head_dim]."""
        return self.kv[:, :, slot, :, :tokens]

    def write(self, slot: int, kv: Tensor) -> None:
        self.kv[:, :, slot, :, : kv.shape[3]] = kv


class SlotMemory:
    """All arenas of one engine. `single_length` makes a single arena, for CUDA graphs, whose
    addresses must not change."""

    def __init__(
        self, shape: KVShape, *, max_slots: int, max_tokens: int, single_length: bool = False
    ) -> None:
        self.shape, self.max_slots, self.max_tokens = shape, max_slots, max_tokens
        self.generation = 0
        """Another number whenever a tenant came, left or moved."""
        self._arenas: dict[int, Arena] = {}
        self.lengths = slot_lengths(max_tokens, single_length=single_length)
        if single_length:
            # One slot more than can be taken: padding rows write there.
            length = self.lengths[0]
            self._arenas[length] = Arena(shape, length, max_slots + 1, max_slots + 1)

    def length_for(self, tokens: int) -> int:
        """The length of the arena for a sequence of so many tokens."""
        return self.lengths[bisect_left(self.lengths, tokens)]

    def arena(self, length: int) -> Arena:
        if length not in self._arenas:
            self._arenas[length] = Arena(self.shape, length, 8, self.max_slots)
        return self._arenas[length]

    @property
    def only(self) -> Arena:
        """The arena of a memory with a single length."""
        return self._arenas[self.lengths[0]]

    def place(self, tenant: Tenant, tokens: int) -> None:
        """Sees to it that the tenant has a slot for `tokens` tokens, and takes along what is
        computed."""
        length = self.length_for(tokens)
        old, slot = tenant.arena, tenant.slot
        if old is not None and old.length >= length:
            return
        new = self.arena(length)
        new.add(tenant)
        self.generation += 1
        if old is not None:
            new.write(tenant.slot, old.read(slot, tenant.computed))
            old.free([slot])

    def release(self, tenants: Sequence[Tenant], *, wipe: bool = False) -> list[tuple[int, int]]:
        """Frees the slots of those that have one; see `Arena.free`."""
        self.generation += 1
        moves: list[tuple[int, int]] = []
        for arena in {tenant.arena for tenant in tenants if tenant.arena is not None}:
            slots = [tenant.slot for tenant in tenants if tenant.arena is arena]
            moves += arena.free(slots, wipe=wipe)
        for tenant in tenants:
            tenant.arena = None
        return moves

    # The engine's thread may add an arena while another thread asks these two: hence the lists.

    @property
    def taken(self) -> int:
        return sum(len(a.tenants) for a in list(self._arenas.values()))

    @property
    def bytes(self) -> int:
        return sum(a.kv.numel() * a.kv.element_size() for a in list(self._arenas.values()))
