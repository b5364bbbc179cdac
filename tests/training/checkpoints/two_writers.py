"""Run by torchrun: two ranks write one checkpoint in the background."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch

from ludic.inference.tiny import tiny_model
from ludic.sharding.fsdp import init_mesh
from ludic.sharding.world import World
from ludic.training import checkpoint_contents
from ludic.training.checkpoint import Checkpointer
from ludic.training.checkpoint_contents import TrainerState, verify_checkpoint, write_shard
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.update.optimizer import MasterAdamW


def main(folder: Path) -> None:
    world = World.of(init_mesh("cpu", timeout_s=60), torch.device("cpu"))
    model, gate = tiny_model(), threading.Event()

    def slow(*args: Any) -> None:
        assert gate.wait(40), "the disk was waited for"
        write_shard(*args)

    checkpoint_contents.write_shard = slow  # type: ignore[assignment]
    optimizer = MasterAdamW(model.named_parameters(), TrainerConfig())
    saver = Checkpointer(CheckpointConfig(folder, background=True), world)
    saver.save(model, optimizer, TrainerState(1, 1))
    for _ in range(3):
        world.barrier()  # collectives of the training, while the writers have theirs
    assert saver.latest() is None
    gate.set()
    saver.finish()
    path = saver.latest()
    assert path is not None
    assert verify_checkpoint(path)["world_size"] == 2
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
