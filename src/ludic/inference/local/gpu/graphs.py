"""Functions over fixed buffers, captured as CUDA graphs and replayed; plain calls elsewhere.

A graph reads the module's weights where they lay when it was captured, so an update in place needs
no new graph. Weights that moved, because new tensors were assigned, make every graph stale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from ludic.plumbing.cuda_graphs import capture


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

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
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
