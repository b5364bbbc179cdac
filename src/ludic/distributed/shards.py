"""Many ranks' weights in one file in shared memory: each rank writes the rows that it has.

Nothing is gathered on any device: it has its shard and no more, except where an adapter is merged,
which takes one weight at a time. The host has all weights once, in the file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ludic.distributed.vllm.placement import shared_memory_id
from ludic.distributed.vllm.shared_memory import SharedWeights, make_shared
from ludic.distributed.weights_file import map_file
from ludic.sharding.weights import ModelWeights, local_rows
from ludic.sharding.world import World


def ranks_share_memory(world: World) -> bool:
    """Whether all ranks see the same shared memory. A collective."""
    place = shared_memory_id()
    return not world.largest(float(world.share({"memory": place})["memory"] != place))[0]


def write_shards(weights: ModelWeights, world: World) -> SharedWeights | None:
    """All weights in one file, written by all ranks together; rank 0 gets it, the others None.
    A collective: where one rank fails, all raise."""
    shared: SharedWeights | None = None
    error: Exception | None = None
    if world.leads:
        try:
            layout = {name: (t.dtype, tuple(t.shape)) for name, t, _ in weights.parts()}
            shared = make_shared(layout)
        except Exception as exc:
            error = exc
    world.agree(error)
    path = world.share({"path": "" if shared is None else str(shared.path)})["path"]
    try:
        _write_rows(weights, Path(path), world)
    except Exception as exc:
        error = exc
    world.agree(error)
    return shared


@torch.no_grad()
def _write_rows(weights: ModelWeights, path: Path, world: World) -> None:
    """Writes this rank's rows, and rank 0's copy of what every rank has."""
    places = map_file(path)
    for name, tensor, merge in weights.parts():
        rows, first, _ = local_rows(tensor.detach()) if merge is None else (merge(), None, ())
        if first is None and world.leads and rows is not None:
            places[name].copy_(rows)
        elif first is not None and rows is not None:
            places[name][first : first + len(rows)].copy_(rows)
