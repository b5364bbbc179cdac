"""Prompts in rectangles: many sequences' chunks in one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.inference.local.arena import Arena
from ludic.inference.local.attention import NEG_INF, AttentionCall, rotate
from ludic.inference.local.forward import Forward
from ludic.inference.local.gpu.graphs import GraphCache
from ludic.inference.local.scheduler import Work


@dataclass(slots=True)
class _Rectangle:
    """`count` sequences by `width` tokens. Padding is written to a slot that nobody has."""

    count: int
    width: int
    table: Tensor
    """[3, count, width]: ids, positions, the slot to write to."""
    columns: Tensor
    """[2, count]: the slot to read from, and the flat place of the last token."""
    fresh: bool = False
    """Whether every sequence is computed from its first token on."""
    logits: Tensor | None = None


class RectangleLayout:
    """Sequence i's rows attend to the first `length` tokens of slot `slots[i]`."""

    def __init__(
        self, kv: Tensor, box: _Rectangle, length: int, kernels: ModuleType | None
    ) -> None:
        self.kv, self.box, self.length, self.kernels = kv, box, length, kernels
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        layer, q, k, v, scale, window, rotary = call
        box, cache = self.box, self.kv[layer]
        _, positions, target = (part.flatten() for part in box.table)
        if rotary is not None and self.kernels is not None:
            q = self.kernels.rotate_and_store(q, k, v, rotary, cache, target, positions)
        else:
            if rotary is not None:
                q, k = rotate(q, rotary), rotate(k, rotary)
            where = (target, slice(None), positions)
            cache[0][where], cache[1][where] = k, v
        keys, values = (part[:, :, : self.length].index_select(0, box.columns[0]) for part in cache)
        if box.fresh and window is None:
            return self._causal(q, keys, values, scale)
        return self._masked(q, keys, values, scale, window)

    def _causal(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Rows and keys are the same tokens: no mask to read. Padding is last, and seen by none."""
        n, width = self.box.count, self.box.width
        out = F.scaled_dot_product_attention(
            q.view(n, width, *q.shape[1:]).transpose(1, 2),
            keys,
            values,
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(n * width, *q.shape[1:])

    def _masked(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        n, width, positions = self.box.count, self.box.width, self.box.table[1]
        kv_heads, dim = keys.shape[1], keys.shape[3]
        group = q.shape[1] // kv_heads
        if window not in self.masks:
            self.masks[window] = self._mask(positions, group, q.dtype, window)
        # [count, width, kv_heads, group, dim] to rows of (group, width) under each key-value head
        rows = q.view(n, width, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            rows.reshape(n, kv_heads, group * width, dim),
            keys,
            values,
            attn_mask=self.masks[window],
            scale=scale,
        )
        out = out.view(n, kv_heads, group, width, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(n * width, kv_heads * group, dim)

    def _mask(
        self, positions: Tensor, group: int, dtype: torch.dtype, window: int | None
    ) -> Tensor:
        at = torch.arange(self.length, device=positions.device)
        hidden = at > positions[:, :, None]
        if window is not None:
            hidden |= at <= positions[:, :, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        mask.masked_fill_(hidden, NEG_INF)
        return mask.repeat(1, group, 1)[:, None]


class Prefill:
    """Computes chunks of prompts; the answer is the logits after each chunk's last token."""

    def __init__(
        self,
        forward: Forward,
        arena: Arena,
        *,
        trash: int,
        vocab: int,
        lengths: Seq[int],
        max_tokens: int,
        graphs: GraphCache,
        to_device: Callable[..., Tensor],
        kernels: ModuleType | None = None,
    ) -> None:
        self.forward, self.arena, self.trash, self.vocab = forward, arena, trash, vocab
        self.lengths, self.max_tokens, self.graphs = lengths, max_tokens, graphs
        self.to_device, self.kernels = to_device, kernels
        self._boxes: dict[tuple[int, int, bool], _Rectangle] = {}

    def batches(self, work: Seq[Work]) -> list[list[Work]]:
        """Chunks of like width together, each batch within the token budget."""
        out: list[list[Work]] = []
        for item in sorted(work, key=lambda w: w.count):
            width = _width(item.count)
            if out and _count(len(out[-1]) + 1) * width <= self.max_tokens:
                out[-1].append(item)
            else:
                out.append([item])
        return out

    def __call__(self, work: Seq[Work]) -> Tensor:
        """Logits [len(work), vocab]."""
        width = _width(max(item.count for item in work))
        count = _count(len(work))
        ends = [item.sequence.computed + item.count for item in work]
        new = all(item.sequence.computed == 0 for item in work)
        length = width if new else next(n for n in self.lengths if n >= max(ends))
        small = count * width <= 2048
        box = self._boxes.get((count, width, new)) if small else None
        filled = self._fill(work, count, width, new)
        if box is None:
            box = filled
            if small:
                self._boxes[count, width, new] = box
                dtype = self.arena.kv.dtype
                box.logits = torch.zeros(count, self.vocab, dtype=dtype, device=box.table.device)
        else:
            box.table.copy_(filled.table)
            box.columns.copy_(filled.columns)
        if not small:
            return self._forward(box, length)[: len(work)]
        logits = box.logits
        assert logits is not None

        def compute() -> None:
            logits.copy_(self._forward(box, length))

        self.graphs.run(("prefill", count, width, length, new), compute)
        return logits[: len(work)]

    def _fill(self, work: Seq[Work], count: int, width: int, new: bool) -> _Rectangle:
        table = torch.zeros(3, count, width, dtype=torch.long)
        table[2] = self.trash
        columns = torch.zeros(2, count, dtype=torch.long)
        columns[0] = self.trash
        columns[1] = torch.arange(count) * width
        for i, item in enumerate(work):
            s, first, n = item.sequence, item.sequence.computed, item.count
            table[0, i, :n] = torch.tensor(s.tokens[first : first + n])
            table[1, i, :n] = torch.arange(first, first + n)
            table[2, i, :n] = s.slot
            columns[0, i] = s.slot
            columns[1, i] += n - 1
        device = self.arena.kv.device
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
            columns = columns.pin_memory().to(device, non_blocking=True)
        return _Rectangle(count, width, table, columns, new)

    def _forward(self, box: _Rectangle, length: int) -> Tensor:
        ids, positions, _ = box.table
        layout = RectangleLayout(self.arena.kv, box, length, self.kernels)
        return self.forward(ids.reshape(1, -1), positions.reshape(1, -1), layout, box.columns[1])


def _width(tokens: int) -> int:
    """A few widths only, so that graphs are met again."""
    for width in (16, 32, 64, 128):
        if tokens <= width:
            return width
    return -(-tokens // 128) * 128


def _count(sequences: int) -> int:
    for count in (1, 4, 16, 32, 64):
        if sequences <= count:
            return count
    return -(-sequences // 64) * 64
