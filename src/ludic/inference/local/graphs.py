"""Functions over fixed buffers, captured as CUDA graphs and replayed; plain calls elsewhere.

A graph reads the module's weights where they lie, so an update in place needs no new capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class GraphCache:
    """One graph per key, captured when the key is first asked for, all in one memory pool."""

    def __init__(self, device: torch.device, *, capture: bool) -> None:
        self.device, self.capture = device, capture
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Does what `function` does to the buffers that it closes over."""
        if not self.capture:
            function()
            return
        if key not in self._graphs:
            # The call itself, outside of a graph: libraries set themselves up on first use.
            function()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.current_stream(self.device).synchronize()
            # Other threads (the trainer's) may allocate meanwhile; only ours must not.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
            self._graphs[key] = graph
            return
        self._graphs[key].replay()
