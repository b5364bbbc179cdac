"""The decode step over fixed buffers: row r is slot r, and the sampled token is the next input.

Nothing comes from the host between two steps of the same sequences, so the host may stay one step
behind and the device never waits for it.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ludic.inference.local.arena import Arena
from ludic.inference.local.forward import Forward
from ludic.inference.local.gpu.graphs import GraphCache
from ludic.inference.local.gpu.layouts import RowsLayout
from ludic.inference.local.noise import keyed_uniform
from ludic.inference.local.sampler import draw
from ludic.inference.local.sequence import Sequence
from ludic.inference.local.transfer import to_device


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

        # One tensor, so that a slot is set or moved by one copy.
        self.state = torch.zeros(5, slots, dtype=torch.long, device=device)
        self.ids, self.positions, self.live, self.keys, self.at = self.state.unbind()
        self.inverse_temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)
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
        slots = to_device([s.slot for s in sequences], self.device)
        self.state[:, slots] = to_device(rows, self.device)
        temperatures = [1.0 / (s.sampling.temperature or 1.0) for s in sequences]
        self.inverse_temperature[slots] = to_device(temperatures, self.device, torch.float32)

    def move_rows(self, moves: list[tuple[int, int]]) -> None:
        """What stood in the first slot of each pair stands in the second from now on."""
        if moves:
            sources, targets = to_device(list(zip(*moves, strict=True)), self.device)
            self.state[:, targets] = self.state[:, sources]
            self.inverse_temperature[targets] = self.inverse_temperature[sources]

    def clear_rows(self, first: int, end: int) -> None:
        """Nobody decodes in these slots."""
        self.state[:, first:end] = 0

    def sizes(self, rows: int, length: int) -> tuple[int, int]:
        """The smallest graph that holds so many slots and tokens."""
        return (
            next(n for n in self.row_sizes if n >= rows),
            next(n for n in self.lengths if n >= length),
        )

    def step(self, rows: int, length: int) -> None:
        """Computes, samples, and makes the samples the next input, without the host."""

        def decode() -> None:
            logits = self._forward(rows, length)
            if self.kernels is not None:
                self.kernels.draw_and_carry_on(logits, self, rows)
                return
            scaled = logits * self.inverse_temperature[:rows, None]
            tokens, logprobs = draw(scaled, keyed_uniform(self.keys[:rows], self.at[:rows]))
            live = self.live[:rows]
            self.tokens[:rows], self.logprobs[:rows] = tokens, logprobs
            self.ids[:rows] = tokens * live
            self.positions[:rows] += live
            self.at[:rows] += live

        self.graphs.run(("decode", rows, length), decode)

    def step_logits(self, rows: int, length: int) -> Tensor:
        """Computes only; the caller samples, then calls `set_rows`."""
        if self.logits is None:
            slots = self.ids.shape[0]
            dtype = torch.promote_types(self.arena.kv.dtype, torch.float32)
            self.logits = torch.zeros(slots, self.vocab, dtype=dtype, device=self.device)
        logits = self.logits

        def compute() -> None:
            logits[:rows] = self._forward(rows, length)

        self.graphs.run(("logits", rows, length), compute)
        return logits[:rows]

    def _forward(self, rows: int, length: int) -> Tensor:
        layout = RowsLayout(self.arena.kv, rows, length, self.positions[:rows], self.kernels)
        return self.forward(self.ids[None, :rows], self.positions[None, :rows], layout)
