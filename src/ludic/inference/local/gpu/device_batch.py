"""The decode step over fixed buffers: row r is slot r, and the sampled token is the next input.

Between two steps of the same sequences nothing comes from the host, so the host may run one step
behind and the device never waits for it.

Steps are captured as CUDA graphs and replayed; without CUDA they are plain calls. A graph reads the
module's weights at their addresses at capture, so an update in place needs no new graph. Weights
that moved, because new tensors were assigned, make every graph stale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.arena import Arena, to_device
from ludic.inference.local.gpu.layouts import RowsLayout
from ludic.inference.local.sampler import draw
from ludic.inference.local.sequence import Sequence
from ludic.inference.local.view import Forward
from ludic.plumbing.cuda_streams import capture
from ludic.seeding import keyed_uniform


class GraphCache:
    """One graph per key, captured when the key is asked for a second time, all in one memory pool.

    A capture takes as long as a few plain calls: what is met once is not worth it.
    """

    def __init__(
        self, device: torch.device, *, capture: bool, weights: Callable[[], Iterable[Tensor]]
    ) -> None:
        self.device, self.capture = device, capture
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._met: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._weights = weights
        self._addresses: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._graphs)

    def drop_if_moved(self) -> None:
        """Forgets every graph when one of the weights lies elsewhere than at the capture."""
        if self._graphs and self._where() != self._addresses:
            self._graphs.clear()
            # A pool without graphs is gone; its handle must not be used again.
            self._pool = torch.cuda.graph_pool_handle()

    def _where(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._weights())

    def run(self, key: Hashable, function: Callable[[], object]) -> None:
        """Does what `function` does to the buffers that it closes over."""
        if not self.capture or key not in self._met:
            # Outside of a graph libraries set themselves up, too.
            self._met.add(key)
            function()
            return
        if key not in self._graphs:
            if not self._graphs:
                self._addresses = self._where()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.current_stream(self.device).synchronize()
            with capture(graph, self._pool):
                function()
            self._graphs[key] = graph
        self._graphs[key].replay()


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


def split_results(results: Tensor) -> tuple[Tensor, Tensor]:
    """The sampled tokens (int64) and their log-probs (float32) in one block of memory."""
    tokens = 2 * len(results) // 3
    return results[:tokens].view(torch.long), results[tokens:].view(torch.float32)


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
        self.state = torch.zeros(7, slots, dtype=torch.long, device=device)
        self.ids, self.positions, self.live, self.keys, self.at, *shared = self.state.unbind()
        self.shared: tuple[Tensor, Tensor] = (shared[0], shared[1])
        """Of each slot: where its first tokens are, too, and how many."""
        self.inverse_temperature = torch.ones(slots, dtype=torch.float32, device=device)
        # Likewise, so that a step's results are fetched by one copy.
        self.results = torch.zeros(3 * slots, dtype=torch.int32, device=device)
        self.tokens, self.logprobs = split_results(self.results)
        self.logits: Tensor | None = None
        self.vocab = vocab
        self.row_sizes = row_buckets(slots)
        # A kernel reads no further than each row's position: one graph does for every length.
        self.lengths = [arena.length] if kernels is not None else length_buckets(arena.length)
        self.parts = dict.fromkeys(self.row_sizes, 1)
        """By the rows of a step: how many programs share one."""
        if kernels is not None:
            for rows in self.row_sizes:
                self.parts[rows] = kernels.row_parts(
                    rows, arena.shape.kv_heads, arena.length, device
                )

    def set_rows(self, sequences: list[Sequence]) -> None:
        """Writes the state of slots whose sequence is ready to decode."""
        if not sequences:
            return
        rows = np.array(
            [(s.tokens[-1], s.computed, 1, s.key, s.generated, s.slot, 0) for s in sequences],
            dtype=np.int64,
        ).T.copy()
        rows[6].view(np.float64)[:] = [1.0 / (s.sampling.temperature or 1.0) for s in sequences]
        packed = to_device(rows, self.device)
        self.state[:5, packed[5]] = packed[:5]
        self.inverse_temperature[packed[5]] = packed[6].view(torch.float64).float()

    def move_rows(self, moves: list[tuple[int, int]]) -> None:
        """What stood in the first slot of each pair stands in the second from now on."""
        if moves:
            sources, targets = to_device(list(zip(*moves, strict=True)), self.device)
            self.state[:, targets] = self.state[:, sources]
            self.inverse_temperature[targets] = self.inverse_temperature[sources]

    def share_rows(self, places: list[tuple[int, int]]) -> None:
        """For each slot from the first on: the slot that has the same keys and values for its
        first tokens, to the bit, and for how many. Rows read them there together."""
        self.state[5:, : len(places)] = to_device(places, self.device).t()

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
        positions, (sources, lengths) = self.positions[:rows], self.shared
        layout = RowsLayout(
            self.arena.kv,
            length,
            positions,
            (sources[:rows], lengths[:rows]),
            self.kernels,
            self.parts[rows],
        )
        return self.forward(self.ids[None, :rows], positions[None], layout)
