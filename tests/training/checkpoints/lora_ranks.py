"""Trains an adapter alone, or on the ranks that torchrun started; saves and resumes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from ludic.inference.tiny import tiny_model
from ludic.sharding.fsdp import init_mesh
from ludic.sharding.weights import ModelWeights
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.trainer import Trainer
from tests.training.synthetic import SyntheticSource, reinforce


def adapted(seed: int = 0) -> nn.Module:
    """A small model with an adapter; the frozen weights depend on the seed."""
    base = tiny_model(seed=seed).double()
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian")
    model: nn.Module = get_peft_model(base, config).double()
    return model


def train(folder: Path, steps: int, checkpoints: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """The whole weights after so many steps in all."""
    mesh = init_mesh("cpu", timeout_s=60) if "RANK" in os.environ else None
    model = adapted(seed)
    trainer = Trainer(
        model=model,
        algo=reinforce(),
        batch_source=SyntheticSource() if os.environ.get("RANK", "0") == "0" else None,
        cfg=TrainerConfig(
            learning_rate=1e-3,
            max_seq_len=64,
            micro_token_budget=64,
            run_dir=folder,
            checkpoint=CheckpointConfig(checkpoints, every=2),
        ),
        mesh=mesh,
    )
    trainer.train_sync(steps)
    trainer.close()
    return {name: tensor.clone() for name, tensor in ModelWeights(model)}


def main(out: Path, steps: int, checkpoints: Path) -> None:
    torch.set_num_threads(1)
    weights = train(out.parent / "run", steps, checkpoints)
    if os.environ["RANK"] == "0":
        save_file(weights, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
