"""Many ranks' weights in one file in shared memory: each rank writes its own rows.

No device holds more than its shard, except one weight at a time where an adapter is merged. The
host has all weights once, in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ludic.distributed.vllm.placement import shared_memory_id
from ludic.distributed.vllm.shared_memory import SharedWeights, fill_shared, make_shared
from ludic.sharding.weights import ModelWeights, local_rows
from ludic.sharding.world import World


def ranks_share_memory(world: World) -> bool:
    """Whether all ranks see the same shared memory. A collective."""
    place = shared_memory_id()
    return not world.largest(float(world.share({"memory": place})["memory"] != place))[0]


def write_shards(weights: ModelWeights, world: World) -> SharedWeights | None:
    """All weights in one file, written by all ranks together; rank 0 gets it, the others None.
    A collective: where one rank fails, all raise."""
    layout = {name: (t.dtype, tuple(t.shape)) for name, t, _ in weights.parts()}
    shared: SharedWeights | None = None
    error: Exception | None = None
    if world.leads:
        try:
            shared = make_shared(layout)
        except Exception as exc:
            error = exc
    world.agree(error)
    path = world.share({"path": "" if shared is None else str(shared.path)})["path"]
    rows = _own_rows(weights, world)
    try:
        fill_shared(Path(path), layout, rows)
    except Exception as exc:
        error = exc
        with suppress(Exception):
            for _ in rows:  # the other ranks still merge with this one
                pass
    try:
        world.agree(error)
    except BaseException:
        if shared is not None:
            shared.folder.close()
        raise
    return shared


@torch.no_grad()
def _own_rows(weights: ModelWeights, world: World) -> Iterator[tuple[str, Tensor, int]]:
    """This rank's rows; on rank 0 also what every rank has whole."""
    for name, tensor, merge in weights.parts():
        rows, first, _ = local_rows(tensor.detach()) if merge is None else (merge(), None, ())
        if rows is not None and (first is not None or world.leads):
            yield name, rows, first or 0
