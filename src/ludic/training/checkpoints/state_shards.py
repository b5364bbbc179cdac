"""Tensors of a sharded run in safetensors files: each rank writes its rows, any rank reads any."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ludic.errors import CheckpointError
from ludic.sharding.weights import local_rows
from ludic.sharding.world import World


def write_shard(
    folder: Path, tensors: Mapping[str, Tensor], extra: Mapping[str, Tensor], world: World
) -> None:
    """Writes this rank's rows of every tensor; one that is not sharded, rank 0 alone."""
    local: dict[str, Tensor] = dict(extra)
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        rows, offset, shape = local_rows(tensor)
        if rows is None or (offset is None and not world.leads):
            continue
        local[name] = rows.detach().to("cpu").contiguous()
        described[name] = {"shape": list(shape), "offset": offset or 0}
    file = f"state-{world.rank:05d}.safetensors"
    save_file(local, folder / file, metadata={"pieces": json.dumps(described)})
    with (folder / file).open("rb") as handle:
        os.fsync(handle.fileno())


def describe_shards(folder: Path, ranks: int) -> dict[str, Any]:
    """Every tensor's shape, and which of the ranks' files has which of its rows."""
    result: dict[str, Any] = {}
    for rank in range(ranks):
        name = f"state-{rank:05d}.safetensors"
        with safe_open(folder / name, framework="pt") as opened:
            for key, facts in json.loads(opened.metadata()["pieces"]).items():
                entry = result.setdefault(key, {"shape": facts["shape"], "pieces": []})
                entry["pieces"].append({"file": name, "offset": facts["offset"]})
    return result


def load_tensors(
    folder: Path,
    described: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    *,
    required: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Each tensor of `wanted`, laid out as it is there, from whichever files have its rows."""
    loaded: dict[str, Tensor] = {}
    files = {p["file"] for entry in described.values() for p in entry["pieces"]}
    opened = {f: safe_open(folder / f, framework="pt") for f in files}
    for name, like in wanted.items():
        if name not in described:
            if name in required:
                raise CheckpointError(f"{folder} lacks {name!r}: a checkpoint of another model")
            continue
        if tuple(described[name]["shape"]) != tuple(like.shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {described[name]['shape']} there, "
                f"{list(like.shape)} here: a checkpoint of another model"
            )
        loaded[name] = _read_like(name, like, described[name]["pieces"], opened)
    return loaded


def _read_like(name: str, like: Tensor, pieces: Any, opened: Mapping[str, Any]) -> Tensor:
    from torch.distributed.tensor import DTensor

    if like.ndim == 0:
        return opened[pieces[0]["file"]].get_tensor(name)  # type: ignore[no-any-return]
    rows, offset, _ = local_rows(like)
    start = offset or 0
    count = 0 if rows is None else rows.shape[0]
    parts = []
    for piece in sorted(pieces, key=lambda p: p["offset"]):
        part = opened[piece["file"]].get_slice(name)
        begin, size = piece["offset"], part.get_shape()[0]
        low, high = max(start, begin), min(start + count, begin + size)
        if low < high:
            parts.append(part[low - begin : high - begin])
    local = torch.cat(parts) if parts else like.new_zeros(0, *like.shape[1:], device="cpu")
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local.to(like.device),
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
    )
