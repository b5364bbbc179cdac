"""Run by torchrun from test_fsdp.py: a few steps over gloo, results written as safetensors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from ludic.distributed.local import Rank0OnlyPublisher
from ludic.inference.tiny import tiny_model
from ludic.rollouts import TokenLog
from ludic.sharding.fsdp import init_mesh, meta_parameters
from ludic.sharding.weights import ModelWeights
from ludic.sharding.world import World
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.trainer import Trainer
from tests.training.synthetic import RecordingPublisher, SyntheticSource, reinforce


def main(
    out: Path, steps: int, dtype: str, checkpoints: str, init_from: str = "-", prompt: str = "0"
) -> None:
    torch.set_num_threads(1)
    mesh = init_mesh("cpu", timeout_s=60)
    world = World.of(mesh, torch.device("cpu"))
    if init_from == "-":
        model = tiny_model().to(getattr(torch, dtype))
    else:  # other weights than those in the folder, and no memory for them
        with meta_parameters():
            model = tiny_model(seed=1).to(getattr(torch, dtype))
        assert {p.device.type for p in model.parameters()} == {"meta"}
    inner = RecordingPublisher()
    log = TokenLog(out.with_suffix(".tokens.jsonl.zst"), append=True) if world.leads else None
    trainer = Trainer(
        model=model,
        algo=reinforce(),
        batch_source=SyntheticSource(prompt=int(prompt)) if world.leads else None,
        publisher=Rank0OnlyPublisher(inner if world.leads else None, world),
        cfg=TrainerConfig(
            learning_rate=1e-3,
            max_seq_len=64,
            micro_token_budget=64,
            run_dir=out.parent / "run",
            checkpoint=CheckpointConfig(checkpoints, every=2) if checkpoints != "-" else None,
        ),
        mesh=mesh,
        init_from=None if init_from == "-" else init_from,
        token_log=log,
    )
    trainer.train_sync(steps)
    weights = {name: tensor.clone() for name, tensor in ModelWeights(model)}
    if world.leads:
        assert inner.versions == list(range(inner.versions[0], steps + 1))
        save_file(weights, out)
    trainer.close()
    if log is not None:
        log.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
