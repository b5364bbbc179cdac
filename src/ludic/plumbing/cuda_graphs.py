"""Capturing CUDA graphs in a process where several threads do."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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
