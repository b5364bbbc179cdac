"""Work on a GPU beside what other threads have queued there.

A whole device is never waited for: that is an error while another thread captures a graph, and
waits for everything that the trainer has queued.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
