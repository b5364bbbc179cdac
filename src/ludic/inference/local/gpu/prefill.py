"""Prefill in rectangles: chunks of many sequences' prompts in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.arena import Arena, to_device
from ludic.inference.local.gpu.device_batch import GraphCache, length_buckets
from ludic.inference.local.gpu.layouts import RectangleLayout
from ludic.inference.local.scheduler import Work
from ludic.inference.local.view import Forward
from ludic.memory.engine import MAX_TOKENS

_GRAPH_TOKENS = 8192
"""Up to so many tokens a pass is bound by launches, and worth a graph."""


class _Rectangle(NamedTuple):
    """`rows` sequences by `width` tokens, in one tensor, so that one copy brings it to the device.
    Padding is written to a slot that nobody has."""

    flat: Tensor
    rows: int
    width: int

    def parts(self) -> tuple[Tensor, Tensor]:
        """Ids, positions and the slot to write to, [3, rows, width]; the slots to read from."""
        table = self.flat[self.rows :].view(3, self.rows, self.width)
        return table, self.flat[: self.rows]


class Prefill:
    """Computes chunks of prompts."""

    def __init__(
        self,
        forward: Forward,
        arena: Arena,
        graphs: GraphCache,
        kernels: ModuleType | None = None,
    ) -> None:
        self.forward, self.arena, self.graphs, self.kernels = forward, arena, graphs, kernels
        self.trash = arena.kv.shape[2] - 1
        # Fewer than a decode step has: a prompt's attention is a small part of it.
        self.lengths = sorted({*length_buckets(arena.length)[1::2], arena.length})
        self._boxes: dict[tuple[int, int, bool], _Rectangle] = {}
        self._one_row = torch.zeros(1, dtype=torch.long, device=arena.kv.device)

    def batches(self, work: Seq[Work]) -> list[list[Work]]:
        """Chunks of like width together, each batch within the token budget.

        In a pass that is bound by launches any widths are alike. A long prompt is worth a pass
        without padding to its width, and without a mask for those that are not fresh."""
        out: list[list[Work]] = []
        for item in sorted(work, key=lambda w: w.count):
            width = _width(item.count)
            if out:
                first = out[-1][0]
                tokens = _count(len(out[-1]) + 1, width) * width
                alike = width <= 2 * _width(first.count) and _fresh(item) == _fresh(first)
                if tokens <= _GRAPH_TOKENS or (alike and tokens <= MAX_TOKENS):
                    out[-1].append(item)
                    continue
            out.append([item])
        return out

    def __call__(self, work: Seq[Work]) -> None:
        """Computes the chunks' keys and values. Nobody asks for logits: of one row only, then."""
        count, width, length, fresh = self._sizes(work)
        filled = self._fill(work, count, width)
        if count * width > _GRAPH_TOKENS:
            self._forward(filled, length, fresh, self._one_row)
            return
        box = self._boxes.setdefault((count, width, fresh), filled)
        if box is not filled:
            box.flat.copy_(filled.flat)
        self.graphs.run(
            ("prefill", count, width, length, fresh),
            lambda: self._forward(box, length, fresh, self._one_row),
        )

    def every_row(self, work: Seq[Work]) -> Tensor:
        """Logits after every token, chunk by chunk: [tokens, vocab]."""
        _, width, length, fresh = self._sizes(work)
        rows = [i * width + j for i, item in enumerate(work) for j in range(item.count)]
        box = self._fill(work, len(work), width)
        return self._forward(box, length, fresh, to_device(rows, self.arena.kv.device))

    def _sizes(self, work: Seq[Work]) -> tuple[int, int, int, bool]:
        """Sequences, width and attended length of the rectangle, and whether all are fresh."""
        width = _width(max(item.count for item in work))
        fresh = all(map(_fresh, work))
        end = max(item.sequence.computed + item.count for item in work)
        longest = width if fresh else next(n for n in self.lengths if n >= end)
        return _count(len(work), width), width, min(longest, self.arena.length), fresh

    def _fill(self, work: Seq[Work], count: int, width: int) -> _Rectangle:
        counts, first, slots = np.zeros((3, count, 1), dtype=np.int64)
        slots[:] = self.trash
        ids: list[int] = []
        for i, item in enumerate(work):
            s = item.sequence
            counts[i], first[i], slots[i] = item.count, s.computed, s.slot
            ids += s.tokens[s.computed : s.computed + item.count]
        steps = np.arange(width)
        real = steps < counts
        flat = np.zeros(count + 3 * count * width, dtype=np.int64)
        flat[:count] = slots[:, 0]
        table = flat[count:].reshape(3, count, width)
        table[0][real] = ids
        table[1] = (first + steps) * real
        table[2] = np.where(real, slots, self.trash)
        return _Rectangle(to_device(flat, self.arena.kv.device), count, width)

    def _forward(self, box: _Rectangle, length: int, fresh: bool, rows: Tensor) -> Tensor:
        (ids, positions, target), slots = box.parts()
        layout = RectangleLayout(
            self.arena.kv, slots, positions, target, length, self.kernels, fresh=fresh
        )
        return self.forward(ids.reshape(1, -1), positions.reshape(1, -1), layout, rows)


def _width(tokens: int) -> int:
    """A few widths only, so that graphs are met again."""
    return 32 if tokens <= 32 else -(-tokens // 128) * 128


def _count(sequences: int, width: int) -> int:
    """Likewise of sequences, where a pass is worth a graph: a long one must not carry padding."""
    padded = next((n for n in (4, 16) if sequences <= n), -(-sequences // 64) * 64)
    return padded if padded * width <= _GRAPH_TOKENS else sequences


def _fresh(item: Work) -> bool:
    return item.sequence.computed == 0
