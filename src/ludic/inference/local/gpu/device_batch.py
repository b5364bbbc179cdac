"""The decode step over fixed buffers: row r is slot r, and the sampled token is the next input.

Nothing comes from the host between two steps of the same sequences, so the host may stay one step
behind and the device never waits for it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.inference.local.arena import Arena
from ludic.inference.local.attention import AttentionCall, additive_mask, rotate
from ludic.inference.local.forward import Forward
from ludic.inference.local.gpu.graphs import GraphCache
from ludic.inference.local.noise import keyed_uniform
from ludic.inference.local.sampler import draw
from ludic.inference.local.sequence import Sequence


class RowsLayout:
    """Row r attends to slot r up to its position; without `kernels`, to its first `length` tokens,
    of which the later ones are masked."""

    def __init__(
        self, kv: Tensor, rows: int, length: int, positions: Tensor, kernels: ModuleType | None
    ) -> None:
        self.kv, self.rows, self.length, self.positions = kv, rows, length, positions
        self.kernels = kernels
        self.slots = torch.arange(rows, device=kv.device)
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        layer, q, k, v, scale, window, rotary = call
        keys, values = self.kv[layer]
        if rotary is not None and self.kernels is not None:
            q = self.kernels.rotate_and_store(
                q, k, v, rotary, (keys, values), self.slots, self.positions
            )
        else:
            if rotary is not None:
                q, k = rotate(q, rotary), rotate(k, rotary)
            where = (self.slots, slice(None), self.positions)
            keys[where], values[where] = k, v
        if self.kernels is not None:
            out: Tensor = self.kernels.attend_rows(
                q.contiguous(), keys, values, self.positions, scale, window
            )
            return out
        if window not in self.masks:
            self.masks[window] = additive_mask(self.positions, self.length, q.dtype, window)
        rows, heads, dim = q.shape
        kv_heads = k.shape[1]
        return F.scaled_dot_product_attention(
            q.reshape(rows, kv_heads, heads // kv_heads, dim),
            keys[:rows, :, : self.length],
            values[:rows, :, : self.length],
            attn_mask=self.masks[window],
            scale=scale,
        ).flatten(1, 2)


def row_buckets(most: int) -> list[int]:
    """Batch sizes with a graph of their own: 16, 32, 64, then every 64."""
    return sorted({min(n, most) for n in (16, 32, *range(64, most + 64, 64))})


def length_buckets(most: int) -> list[int]:
    """Attended lengths with a graph of their own: powers of two and the middle between them."""
    lengths, n = [], 128
    while n < most:
        lengths += [n, n + n // 2]
        n *= 2
    return sorted({x for x in lengths if x < most} | {most})


class DeviceBatch:
    """The state of every slot on the device, and the step that moves all of them on."""

    def __init__(
        self,
        forward: Forward,
        arena: Arena,
        slots: int,
        vocab: int,
        graphs: GraphCache,
        kernels: ModuleType | None = None,
    ) -> None:
        self.forward, self.arena, self.graphs, self.kernels = forward, arena, graphs, kernels
        device = arena.kv.device
        self.device = device

        def longs() -> Tensor:
            return torch.zeros(slots, dtype=torch.long, device=device)

        # One tensor, so that a slot is set or moved by one copy.
        self.state = torch.zeros(5, slots, dtype=torch.long, device=device)
        self.ids, self.positions, self.live, self.keys, self.at = self.state.unbind()
        self.inverse_temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self.tokens = longs()
        self.logprobs = torch.zeros(slots, dtype=torch.float32, device=device)
        self.logits: Tensor | None = None
        self.vocab = vocab
        self.row_sizes = row_buckets(slots)
        # A kernel reads no further than each row's position: one graph does for every length.
        self.lengths = [arena.length] if kernels is not None else length_buckets(arena.length)

    def set_rows(self, sequences: list[Sequence]) -> None:
        """Writes the state of slots whose sequence is ready to decode."""
        if not sequences:
            return
        rows = [
            [s.tokens[-1] for s in sequences],
            [s.computed for s in sequences],
            [1] * len(sequences),
            [s.key for s in sequences],
            [s.generated for s in sequences],
        ]
        slots = self.to_device([s.slot for s in sequences])
        self.state[:, slots] = self.to_device(rows)
        temperatures = [1.0 / (s.sampling.temperature or 1.0) for s in sequences]
        self.inverse_temperature[slots] = self.to_device(temperatures, torch.float32)

    def move_row(self, source: int, target: int) -> None:
        """What stood in slot `source` stands in `target` from now on."""
        self.state[:, target] = self.state[:, source]
        self.inverse_temperature[target] = self.inverse_temperature[source]

    def clear_row(self, slot: int) -> None:
        """Nobody decodes in this slot."""
        self.state[:, slot] = 0

    def to_device(self, values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        host = torch.tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def sizes(self, rows: int, length: int) -> tuple[int, int]:
        """The smallest graph that holds so many slots and tokens."""
        return (
            next(n for n in self.row_sizes if n >= rows),
            next(n for n in self.lengths if n >= length),
        )

    def step(self, rows: int, length: int) -> None:
        """Computes, samples, and makes the samples the next input: no word from the host."""

        def decode() -> None:
            logits = self._forward(rows, length)
            if self.kernels is not None:
                self.kernels.draw_and_carry_on(logits, self, rows)
                return
            scaled = logits * self.inverse_temperature[:rows, None]
            tokens, logprobs = draw(scaled, keyed_uniform(self.keys[:rows], self.at[:rows]))
            self._carry_on(rows, tokens)
            self.logprobs[:rows] = logprobs

        self.graphs.run(("decode", rows, length), decode)

    def step_logits(self, rows: int, length: int) -> Tensor:
        """Computes only; the caller samples, then calls `carry_on`."""
        if self.logits is None:
            slots = self.ids.shape[0]
            dtype = self.arena.kv.dtype
            self.logits = torch.zeros(slots, self.vocab, dtype=dtype, device=self.device)
        logits = self.logits

        def compute() -> None:
            logits[:rows] = self._forward(rows, length)

        self.graphs.run(("logits", rows, length), compute)
        return logits[:rows]

    def carry_on(self, rows: int, tokens: Tensor) -> None:
        self._carry_on(rows, tokens)

    def _carry_on(self, rows: int, tokens: Tensor) -> None:
        live = self.live[:rows]
        self.tokens[:rows] = tokens
        self.ids[:rows] = tokens * live
        self.positions[:rows] += live
        self.at[:rows] += live

    def _forward(self, rows: int, length: int) -> Tensor:
        layout = RowsLayout(self.arena.kv, rows, length, self.positions[:rows], self.kernels)
        return self.forward(self.ids[None, :rows], self.positions[None, :rows], layout)
