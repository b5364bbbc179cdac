"""Work on a GPU beside what other threads do there: a stream of one's own, the capture of a graph.

A whole device is never waited for: that is an error while another thread captures a graph, and
waits for everything that the trainer has queued.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OWN = threading.local()
"""The calling thread's stream on each device, in `streams`."""


def wait_for(tensors: Iterable[Tensor]) -> None:
    """Returns when what this thread has launched on the tensors' GPUs is done."""
    for device in {tensor.device for tensor in tensors}:
        if device.type == "cuda":
            import torch

            torch.cuda.current_stream(device).synchronize()


@contextmanager
def aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """What this thread launches inside does not queue behind the trainer's work, and is done at the
    end. It may read only what is complete already."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        yield
        return
    import torch

    # Kept: the allocator keeps freed memory by stream.
    streams: dict[torch.device, torch.cuda.Stream] = _OWN.__dict__.setdefault("streams", {})
    if (stream := streams.get(device)) is None:
        stream = streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


_lock = threading.Lock()
_captures = 0
_was_collecting = False


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What this thread launches inside goes into `graph`; other threads go on as they like.

    Python's collector stands still meanwhile. It runs in whichever thread allocates, and freeing
    another graph in this one would end the capture.
    """
    with _collector_held():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def _collector_held() -> Iterator[None]:
    global _captures, _was_collecting
    with _lock:
        if _captures == 0:
            _was_collecting = gc.isenabled()
            gc.disable()
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if _captures == 0 and _was_collecting:
                gc.enable()
