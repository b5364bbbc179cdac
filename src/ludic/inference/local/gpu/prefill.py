"""Prompts in rectangles: many sequences' chunks in one forward pass."""

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
    """`count` sequences by `width` tokens. Padding is written to a slot that nobody has."""

    table: Tensor
    """[3, count, width]: ids, positions, the slot to write to."""
    columns: Tensor
    """[2, count]: the slot to read from, and the flat place of the last token."""


class Prefill:
    """Computes chunks of prompts."""

    def __init__(
        self,
        forward: Forward,
        arena: Arena,
        *,
        vocab: int,
        graphs: GraphCache,
        kernels: ModuleType | None = None,
    ) -> None:
        self.forward, self.arena, self.vocab = forward, arena, vocab
        self.graphs, self.kernels = graphs, kernels
        self.trash = arena.kv.shape[2] - 1
        # Fewer than a decode step has: a prompt's attention is a small part of it.
        self.lengths = sorted({*length_buckets(arena.length)[1::2], arena.length})
        self._boxes: dict[tuple[int, int, bool], tuple[_Rectangle, Tensor]] = {}

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

    def __call__(self, work: Seq[Work]) -> Tensor:
        """Logits after each chunk's last token: [len(work), vocab]."""
        count, width, length, fresh = self._sizes(work)
        filled = self._fill(work, count, width)
        if count * width > _GRAPH_TOKENS:
            return self._forward(filled, length, fresh)[: len(work)]
        if (count, width, fresh) not in self._boxes:
            like = self.arena.kv
            wide = torch.promote_types(like.dtype, torch.float32)
            logits = torch.zeros(count, self.vocab, dtype=wide, device=like.device)
            self._boxes[count, width, fresh] = (filled, logits)
        box, logits = self._boxes[count, width, fresh]
        if box is not filled:
            for fixed, new in zip(box, filled, strict=True):
                fixed.copy_(new)

        def compute() -> None:
            logits.copy_(self._forward(box, length, fresh))

        self.graphs.run(("prefill", count, width, length, fresh), compute)
        return logits[: len(work)]

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
        table = np.zeros((3, count, width), dtype=np.int64)
        table[2] = self.trash
        columns = np.stack([np.full(count, self.trash), np.arange(count) * width])
        steps = np.arange(width)
        for i, item in enumerate(work):
            s, first, n = item.sequence, item.sequence.computed, item.count
            table[0, i, :n] = s.tokens[first : first + n]
            table[1, i, :n] = steps[:n] + first
            table[2, i, :n] = columns[0, i] = s.slot
            columns[1, i] += n - 1
        device = self.arena.kv.device
        return _Rectangle(to_device(table, device), to_device(columns, device))

    def _forward(
        self, box: _Rectangle, length: int, fresh: bool, rows: Tensor | None = None
    ) -> Tensor:
        (ids, positions, target), (slots, last) = box
        layout = RectangleLayout(
            self.arena.kv, slots, positions, target, length, self.kernels, fresh=fresh
        )
        keep = last if rows is None else rows
        return self.forward(ids.reshape(1, -1), positions.reshape(1, -1), layout, keep)


def _width(tokens: int) -> int:
    """A few widths only, so that graphs are met again."""
    return 32 if tokens <= 32 else -(-tokens // 128) * 128


def _count(sequences: int, width: int) -> int:
    """Likewise of sequences, where a pass is worth a graph: a long one must not carry padding."""
    padded = next((n for n in (4, 16) if sequences <= n), -(-sequences // 64) * 64)
    return padded if padded * width <= _GRAPH_TOKENS else sequences


def _fresh(item: Work) -> bool:
    return item.sequence.computed == 0
