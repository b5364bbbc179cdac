"""A safetensors file that is created before its tensors exist, and memory-mapped, so that several
processes can write their parts or change tensors in place."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor, by name."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def bytes_of(layout: Layout) -> int:
    """The size of all tensors together."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in layout.values())


def make_file(path: Path, layout: Layout) -> None:
    """Makes a file of zeros. Raises `OSError` where there is no room for it, as far as the file
    system can tell."""
    entries: dict[str, object] = {}
    end = 0
    # Large elements first: then each begins at a multiple of its size.
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -item[1][0].itemsize):
        begin, end = end, end + dtype.itemsize * prod(shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
        try:
            os.posix_fallocate(file.fileno(), 0, 8 + len(header) + end)
        except AttributeError:  # not every system has it
            pass
        except OSError as exc:  # nor every file system
            if exc.errno == errno.ENOSPC:
                raise


def fill_file(path: Path, parts: Iterable[tuple[str, Tensor, int]]) -> None:
    """Writes rows into such a file: the name of the tensor, the rows, and the number of the first.
    Several processes may fill one file. Raises `OSError` where there is no room: written to a
    mapping, rows without room would end the process."""
    begins, header = _header(path)
    with path.open("r+b", buffering=0) as file:
        for name, rows, first in parts:
            data = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            row = rows[0].numel() * rows.element_size() if rows.ndim and len(rows) else 0
            file.seek(begins + header[name]["data_offsets"][0] + first * row)
            unwritten = data.data
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]


def map_file(path: Path) -> dict[str, Tensor]:
    """The file's tensors, mapped and not copied: what is written to them is in the file, for
    everybody who has mapped it."""
    begins, header = _header(path)
    size = path.stat().st_size
    data = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)[begins:]
    return {
        name: data[slice(*entry["data_offsets"])].view(_TYPES[entry["dtype"]]).view(entry["shape"])
        for name, entry in header.items()
    }


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and each one's entry."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header
