"""Run twice at a time by test_fsdp.py: a rank that ends right after a collective."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from ludic.sharding.fsdp import init_mesh

rank = int(sys.argv[2])
os.environ["RANK"] = str(rank)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
group = init_mesh("cpu").get_group()
dist.all_reduce(torch.zeros(1), group=group)
sys.setswitchinterval(60.0)  # a thread gets the interpreter only where another gives it up
dist.all_reduce(torch.zeros(1), group=group, async_op=True)
sum(range(20_000_000))  # gives it up nowhere: gloo's thread now waits for it with that tensor
