"""CUDA IPC handles as JSON: tensors of one process, seen by another on the same GPU.

torch would pickle them; here every part is a number or base64, so nothing is unpickled.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor


def make_handle(name: str, tensor: Tensor) -> dict[str, Any]:
    """A handle that stays good while `tensor`, contiguous and on a GPU, is alive and unchanged."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, parts = reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]
    (_, size, stride, offset, _, dtype, device, handle, bytes_, begins, _, counter, place, event,
     sync) = parts  # fmt: skip
    return {
        "name": name,
        "gpu": gpu_name(torch.device("cuda", device)),
        "size": list(size),
        "stride": list(stride),
        "offset": offset,
        "dtype": str(dtype).split(".")[-1],
        "handle": _text(handle),
        "storage_bytes": bytes_,
        "storage_offset": begins,
        "counter": _text(counter),
        "counter_offset": place,
        "event": _text(event),
        "event_sync": bool(sync),
    }


def open_handle(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The tensor behind a handle. Raises where it lies on another GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    here = gpu_name(device)
    if handle["gpu"] != here:
        raise ValueError(
            f"{handle['name']} lies on GPU {handle['gpu']} and this server runs on {here}: IPC is "
            "for one GPU, publish over nccl"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    tensor: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size(handle["size"]),
        tuple(handle["stride"]),
        handle["offset"],
        torch.storage.TypedStorage,
        getattr(torch, handle["dtype"]),
        index,
        _bytes(handle["handle"]),
        handle["storage_bytes"],
        handle["storage_offset"],
        False,
        _bytes(handle["counter"]),
        handle["counter_offset"],
        _bytes(handle["event"]),
        handle["event_sync"],
    )
    return tensor


def gpu_name(device: torch.device) -> str:
    """What tells one GPU from another, in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
