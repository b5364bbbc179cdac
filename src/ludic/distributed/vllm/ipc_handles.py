"""CUDA IPC as JSON: memory of one process, seen by another on the same GPU.

torch would pickle its handles; here every part is a number or base64, so nothing is unpickled.
A handle is for a whole piece of memory that the allocator got from the driver, and most pieces hold
many tensors: it is made once per piece and kept for later publishes. (To share a tensor again each
time would also wrap its storage once more, and use up an event, each time.)
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of memory from the driver: where it begins, and its size in bytes."""

    address: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Export:
    """A shared range of addresses. It is good while `anchor`, a storage inside it, is alive: until
    then nobody can have given the piece back to the driver."""

    address: int
    bytes: int
    handle: Mapping[str, Any]
    anchor: StorageWeakRef


class Exports:
    """What this process shares with others on its GPUs. Handles are made at most once."""

    def __init__(
        self,
        share: Callable[[Tensor], dict[str, Any]] | None = None,
        segments: Callable[[int], list[Segment]] | None = None,
    ) -> None:
        self._share = share or share_storage
        self._segments = segments or driver_segments
        self._known: dict[int, list[_Export]] = {}

    def describe(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Handles of the memory in which the tensors lie, and each one's place there. They stay
        good while the tensors, contiguous and on a GPU, are alive."""
        self._known = {
            device: [e for e in exports if not e.anchor.expired()]  # type: ignore[no-untyped-call]
            for device, exports in self._known.items()
        }
        used: dict[int, int] = {}
        memory: list[Mapping[str, Any]] = []
        places = []
        segments: dict[int, list[Segment]] = {}
        for name, tensor in tensors.items():
            place = meta_of(name, tensor)
            if tensor.numel():
                export = self._find(tensor) or self._add(tensor, segments)
                if export.address not in used:
                    used[export.address] = len(memory)
                    memory.append(export.handle)
                place["memory"] = used[export.address]
                place["offset"] = tensor.data_ptr() - export.address
            places.append(place)
        return {"memory": memory, "tensors": places}

    def _find(self, tensor: Tensor) -> _Export | None:
        exports = self._known.get(_index(tensor.device), [])
        at = bisect_right(exports, tensor.data_ptr(), key=lambda e: e.address) - 1
        if at >= 0 and _end(tensor) <= exports[at].address + exports[at].bytes:
            return exports[at]
        return None

    def _add(self, tensor: Tensor, segments: dict[int, list[Segment]]) -> _Export:
        device, storage = _index(tensor.device), tensor.untyped_storage()
        if device not in segments:
            segments[device] = sorted(self._segments(device), key=lambda s: s.address)
        handle = self._share(tensor)
        begins, size = storage.data_ptr(), storage.nbytes()
        at = bisect_right(segments[device], begins, key=lambda s: s.address) - 1
        if at >= 0:
            piece = segments[device][at]
            inside = _end(tensor) <= piece.address + piece.bytes
            # The handle says where in its piece the storage begins: both must see the same piece.
            if inside and handle["offset"] == begins - piece.address:
                handle |= {"offset": 0, "bytes": piece.bytes}
                begins, size = piece.address, piece.bytes
        anchor = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        export = _Export(begins, size, handle, anchor)
        exports = self._known.setdefault(device, [])
        exports.insert(bisect_right(exports, begins, key=lambda e: e.address), export)
        return export


def meta_of(name: str, tensor: Tensor) -> dict[str, Any]:
    """What makes room for a tensor in another process."""
    return {"name": name, "dtype": str(tensor.dtype).split(".")[-1], "shape": list(tensor.shape)}


def open_tensors(update: Mapping[str, Any], device: torch.device) -> list[tuple[str, Tensor]]:
    """The tensors of `Exports.describe`, in another process. Raises where they lie on another
    GPU. What wrote them must be done: nothing here waits for it."""
    memory = [_open(handle, device) for handle in update["memory"]]
    tensors = []
    for place in update["tensors"]:
        dtype, shape = getattr(torch, place["dtype"]), place["shape"]
        if "memory" not in place:
            tensors.append((place["name"], torch.empty(shape, dtype=dtype, device=device)))
            continue
        size = torch.Size(shape).numel() * dtype.itemsize
        part = memory[place["memory"]][place["offset"] : place["offset"] + size]
        tensors.append((place["name"], part.view(dtype).view(shape)))
    return tensors


def share_storage(tensor: Tensor) -> dict[str, Any]:
    """A handle of the storage that `tensor` lies in."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, parts = reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]
    device, handle, size, begins, _, counter, place = parts[6:13]
    return {
        "gpu": gpu_name(torch.device("cuda", device)),
        "handle": b64encode(handle).decode("ascii"),
        "bytes": size,
        "offset": begins,
        "counter": b64encode(counter).decode("ascii"),
        "counter_offset": place,
    }


def driver_segments(device: int) -> list[Segment]:
    """The pieces that torch's allocator got from the driver whole; expandable ones, which grow
    bit by bit, are not among them."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return [
        Segment(segment["address"], segment["total_size"])
        for segment in segments
        if segment["device"] == device and not segment.get("is_expandable", True)
    ]


def gpu_name(device: torch.device) -> str:
    """What tells one GPU from another, in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _open(handle: Mapping[str, Any], device: torch.device) -> Tensor:
    """The bytes behind a handle."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    here = gpu_name(device)
    if handle["gpu"] != here:
        raise ValueError(
            f"the weights are on GPU {handle['gpu']} and this server runs on {here}: IPC is for "
            "one GPU, publish over nccl"
        )
    tensor: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size([handle["bytes"]]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        _index(device),
        b64decode(handle["handle"]),
        handle["bytes"],
        handle["offset"],
        False,
        b64decode(handle["counter"]),
        handle["counter_offset"],
        b"",
        False,  # no event: the trainer waited for its GPU
    )
    return tensor


def _index(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if device.type == "cuda" else 0


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()
