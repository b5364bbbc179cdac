"""How rows attend over a GPU engine's single arena: one row per slot, or rectangles of prompts."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.inference.local.attention import AttentionCall, Masks, grouped_attention, rotate

HALF = (torch.bfloat16, torch.float16)


def _store(
    call: AttentionCall, cache: Tensor, slots: Tensor, positions: Tensor, kernels: ModuleType | None
) -> Tensor:
    """Writes the rows' keys and values to their slots; returns the queries, rotated if need be."""
    _, q, k, v, _, _, rotary = call
    if rotary is not None and kernels is not None:
        turned: Tensor = kernels.rotate_and_store(q, k, v, rotary, cache, slots, positions)
        return turned
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    where = (slots, slice(None), positions)
    cache[0][where], cache[1][where] = k, v
    return q


class RowsLayout:
    """Row r attends to slot r up to its position; without `kernels`, to its first `length` tokens,
    of which the later ones are masked. With `shared`, a kernel reads the first tokens of a row in
    another's slot that has the same ones. At most `parts` of its programs share a row."""

    def __init__(
        self,
        kv: Tensor,
        length: int,
        positions: Tensor,
        shared: tuple[Tensor, Tensor],
        kernels: ModuleType | None,
        parts: int,
    ) -> None:
        self.kv, self.positions, self.shared = kv, positions, shared
        self.kernels, self.parts = kernels, parts
        # The kernels take row r for slot r.
        self.slots = None if kernels is not None else torch.arange(len(positions), device=kv.device)
        self.masks = Masks(positions[:, None], length)

    def attend(self, call: AttentionCall) -> Tensor:
        cache = self.kv[call.layer]
        if self.slots is None:
            assert self.kernels is not None
            _, q, k, v, scale, window, rotary = call
            out: Tensor = self.kernels.attend_rows(
                q, k, v, rotary, cache, self.positions, scale, window, self.parts, self.shared
            )
            return out
        q = _store(call, cache, self.slots, self.positions, self.kernels)
        keys, values = cache[:, : len(self.slots), :, : self.masks.length]
        return grouped_attention(q, keys, values, self.masks, call.scale, call.window)


class RectangleLayout:
    """Sequences by tokens: sequence i attends to the first `length` tokens of slot `slots[i]`.

    `positions` and `target`, the slot that each token is written to, are [sequences, width].
    `fresh`: every sequence begins with its first token and is as wide as `length`.
    """

    def __init__(
        self,
        kv: Tensor,
        slots: Tensor,
        positions: Tensor,
        target: Tensor,
        length: int,
        kernels: ModuleType | None,
        *,
        fresh: bool,
    ) -> None:
        self.kv, self.slots, self.kernels, self.fresh = kv, slots, kernels, fresh
        self.positions, self.target = positions.flatten(), target.flatten()
        self.masks = Masks(positions, length)

    def attend(self, call: AttentionCall) -> Tensor:
        cache, length = self.kv[call.layer], self.masks.length
        q = _store(call, cache, self.target, self.positions, self.kernels)
        keys, values = (part[:, :, :length].index_select(0, self.slots) for part in cache)
        windowed = call.window is not None and call.window < length
        if not self.fresh or windowed:
            return grouped_attention(q, keys, values, self.masks, call.scale, call.window)
        # Rows and keys are the same tokens: no mask to read. Padding is last, and seen by none.
        shares = q.dtype in HALF
        if not shares:
            # In float32 a kernel that shares keys among queries makes whole matrices of scores.
            keys, values = (
                part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (keys, values)
            )
        by_sequence = q.view(len(self.slots), -1, *q.shape[1:]).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            by_sequence, keys, values, is_causal=True, scale=call.scale, enable_gqa=shares
        )
        return out.transpose(1, 2).reshape(q.shape)
