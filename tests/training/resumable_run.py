"""A small synchronous run that a test kills and starts again: python -m … FOLDER STEPS."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from ludic.inference.tiny import tiny_model
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.trainer import Trainer
from tests.training.synthetic import SyntheticSource, reinforce


def main(folder: Path, steps: int, mode: str) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=TrainerConfig(
            learning_rate=1e-3,
            max_seq_len=64,
            micro_token_budget=64,
            schedule="cosine",
            total_steps=steps,
            warmup_steps=2,
            run_dir=folder,
            optimizer_device="cpu" if mode == "host" else None,
            checkpoint=CheckpointConfig(
                folder / "ck", every=1, keep=2, background=mode == "background"
            ),
        ),
    )
    trainer.train_sync(steps)
    trainer.close()
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    save_file(weights, folder / "weights.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
