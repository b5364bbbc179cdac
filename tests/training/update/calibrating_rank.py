"""Run by test_calibrate.py: one of two ranks over gloo that find a budget together."""

from __future__ import annotations

import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ludic.sharding.world import World
from ludic.training.update.calibrate import agreed, largest_that_fits


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    world = World(rank=rank, size=2, device=torch.device("cpu"), group=dist.group.WORLD)

    def peak(tokens: int) -> int | None:
        dist.all_reduce(torch.tensor([tokens]))  # as an update over shards
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([tokens]))
        assert len({int(size) for size in sizes}) == 1
        if rank == 0:
            return 1000 + tokens
        return None if tokens > 30_000 else 5000 + 2 * tokens

    def has_room(tokens: int) -> bool:
        return rank == 0 or tokens <= 20_300

    budget, used = largest_that_fits(
        agreed(peak, has_room, world), limit=100_000, smallest=512, largest=2**20
    )
    print(json.dumps({"budget": budget, "used": used}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
