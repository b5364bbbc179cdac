"""What changed between two versions of the same weights, to the bit.

A tensor's difference is a vector of bytes that is never longer than the tensor. It is empty if
nothing changed, and the tensor's own bytes if little would be saved. Otherwise it has, in this
order, the number of changed elements (8 bytes), their new values, and their places. Places are the
gaps between changed elements if few changed, else one bit per element. A gap is a byte: 255 skips
255 elements; any smaller number skips that many and names the element after them.

Elements are compared as integers: -0.0 differs from 0.0, and NaNs keep their payloads. Values
replace the old ones, so a difference may be applied twice. Applied to other weights than those it
was made against, it gives garbage: compare checksums (`vllm/checksums.py`) before using the result.

Differences are computed on the host in NumPy, where one thread is several times as fast as in
torch. Many tensors are compared in as many threads as torch uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:  # vLLM's workers import this file, and need not have jaxtyping
    from jaxtyping import Shaped, UInt8

_HEADER = 8
_SKIP = 255
_CHUNK = 1 << 20
"""Elements that are looked at together: a multiple of 8, and few enough for a cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Integers = NDArray[Any]
Bytes = NDArray[np.uint8]


def encode_all(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The difference of each tensor that changed. Raises `ValueError` unless both sides have the
    same names, types and shapes."""
    if old.keys() != new.keys():
        raise ValueError(f"the tensors are not the same: {sorted(old.keys() ^ new.keys())[:3]}")
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        encoded = dict(zip(new, threads.map(lambda n: encode(old[n], new[n]), new), strict=True))
    return {name: difference for name, difference in encoded.items() if difference.numel()}


def apply_all(differences: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Changes `tensors` in place. Where it raises, some of them may be changed already."""
    unknown = sorted(differences.keys() - tensors.keys())
    if unknown:
        raise ValueError(f"there are differences of tensors that are not here: {unknown[:3]}")
    for name, difference in differences.items():
        try:
            apply(difference, tensors[name])
        except ValueError as exc:
            raise ValueError(f"{name}: {exc}") from exc


def encode(old: Shaped[Tensor, "*shape"], new: Shaped[Tensor, "*shape"]) -> UInt8[Tensor, " bytes"]:
    """What makes `new` of `old`, on the host. It may share memory with `new`."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype} {list(old.shape)} became {new.dtype} {list(new.shape)}")
    before, after = _integers(old.cpu()), _integers(new.cpu())
    total, whole = after.size, after.view(np.uint8)
    count = sum(int(np.count_nonzero(changed)) for _, changed in _changes(before, after))
    if not count:
        return torch.from_numpy(whole[:0])
    if _HEADER + count * after.itemsize + _places_at_most(count, total) >= whole.size:
        return torch.from_numpy(whole)
    values: list[Integers] = []
    places: list[Bytes] = []
    last = -1
    for start, changed in _changes(before, after):
        positions = np.flatnonzero(changed) + start
        values.append(after[positions])
        if not _by_gaps(count, total):
            places.append(np.packbits(changed, bitorder="little"))
        elif positions.size:
            places.append(_gaps(positions, last))
            last = int(positions[-1])
    header = np.array([count], dtype="<i8").view(np.uint8)
    parts = [header, *(part.view(np.uint8) for part in values), *places]
    return torch.from_numpy(np.concatenate(parts))


def apply(difference: UInt8[Tensor, " bytes"], tensor: Shaped[Tensor, "*shape"]) -> None:
    """Changes `tensor`, contiguous and on the host, in place. Raises `ValueError`, and leaves the
    tensor as it was, where the difference cannot be one of such a tensor."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("a difference is applied to contiguous tensors on the host only")
    elements, data = _integers(tensor), difference.detach().cpu().contiguous().numpy()
    total, each = elements.size, elements.itemsize
    if data.size in (0, total * each):
        elements.view(np.uint8)[: data.size] = data
        return
    wrong = ValueError(f"{data.size} bytes are no difference of {total} elements of {each} bytes")
    count = int(data[:_HEADER].view("<i8")[0]) if data.size > _HEADER else 0
    if not 0 < count <= total or _HEADER + count * each >= data.size:
        raise wrong
    values = data[_HEADER : _HEADER + count * each].view(elements.dtype)
    places = data[_HEADER + count * each :]
    if _by_gaps(count, total):
        named = places != _SKIP
        positions = (np.cumsum(places, dtype=np.int64) + np.cumsum(named) - 1)[named]
    elif places.size == _places_at_most(count, total):
        positions = np.flatnonzero(np.unpackbits(places, bitorder="little"))
    else:
        raise wrong
    if positions.size != count or positions[-1] >= total:
        raise wrong
    elements[positions] = values


def _integers(tensor: Tensor) -> Integers:
    """The tensor's elements as integers of their size, in a row."""
    kind = _INTEGERS.get(tensor.element_size())
    if kind is None:
        raise ValueError(f"{tensor.dtype} has elements of {tensor.element_size()} bytes")
    return tensor.detach().contiguous().reshape(-1).view(kind).numpy()


def _changes(before: Integers, after: Integers) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Where each chunk begins, and which of its elements changed."""
    for start in range(0, after.size, _CHUNK):
        yield start, before[start : start + _CHUNK] != after[start : start + _CHUNK]


def _by_gaps(count: int, total: int) -> bool:
    """Whether the places of `count` changed elements among `total` are written as gaps."""
    return count + total // _SKIP < -(-total // 8)


def _places_at_most(count: int, total: int) -> int:
    return min(count + total // _SKIP, -(-total // 8))


def _gaps(positions: NDArray[np.int64], last: int) -> Bytes:
    """How many elements lie between each position and the one before it, as bytes."""
    gaps = np.diff(positions, prepend=last) - 1
    if gaps.max() < _SKIP:
        return gaps.astype(np.uint8)
    ends = np.cumsum(gaps // _SKIP + 1) - 1
    coded = np.full(ends[-1] + 1, _SKIP, dtype=np.uint8)
    coded[ends] = gaps % _SKIP
    return coded
