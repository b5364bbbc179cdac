"""Run by torchrun from test_fsdp.py: a few steps over gloo, results written as safetensors."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from ludic.distributed.local import Rank0OnlyPublisher
from ludic.inference.tiny import tiny_model
from ludic.plumbing.model_parts import decoder_layers
from ludic.rollouts import TokenLog
from ludic.sharding.fsdp import init_mesh, meta_parameters
from ludic.sharding.weights import ModelWeights
from ludic.sharding.world import World
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.trainer import Trainer
from ludic.training.update import logprobs
from tests.training.synthetic import RecordingPublisher, SyntheticSource, reinforce


class Warnings(logging.Handler):
    """Writes what is said as a warning to a file of this rank, one line for each."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self.path.open("a") as file:
            print(record.getMessage(), file=file)


def run_out_of_memory(trainer: Trainer, where: str, patch: pytest.MonkeyPatch) -> None:
    """Has this rank alone run out of memory in its second pass: in a layer, in the head, or before
    the backward pass."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("injected")

    if where == "room":

        def has_room(_: int) -> bool:
            nonlocal calls
            calls += 1
            return calls != 2

        patch.setattr(trainer.passes.recovery, "_has_room", has_room)
    elif where == "head":
        reduce = logprobs._reduce

        def failing(*args: Any) -> Any:
            fail()
            return reduce(*args)

        failing.__name__ = "_reduce"
        patch.setattr(logprobs, "_reduce", failing)
    else:
        decoder_layers(trainer.model)[int(where)].register_forward_pre_hook(fail)


def train(
    mesh: DeviceMesh,
    patch: pytest.MonkeyPatch,
    out: str,
    steps: int,
    dtype: str = "float64",
    checkpoints: str | None = None,
    init_from: str | None = None,
    prompt: int = 0,
    optimizer: Literal["cpu"] | None = None,
    fails: str | None = None,
    loses_after: Sequence[int] = (),
) -> None:
    """Trains one model, and leaves its weights at `out`, with the run's folder beside them."""
    path, world = Path(out), World.of(mesh, torch.device("cpu"))
    if init_from is None:
        model = tiny_model().to(getattr(torch, dtype))
    else:  # other weights than those in the folder, and no memory for them
        with meta_parameters():
            model = tiny_model(seed=1).to(getattr(torch, dtype))
        assert {p.device.type for p in model.parameters()} == {"meta"}
    source, inner = SyntheticSource(prompt=prompt), RecordingPublisher()
    source.loses_after = list(loses_after)
    log = TokenLog(path.with_suffix(".tokens.jsonl.zst"), append=True) if world.leads else None
    trainer = Trainer(
        model=model,
        algo=reinforce(),
        batch_source=source if world.leads else None,
        publisher=Rank0OnlyPublisher(inner if world.leads else None, world),
        cfg=TrainerConfig(
            learning_rate=1e-3,
            max_seq_len=64,
            micro_token_budget=64,
            run_dir=path.parent / "run",
            checkpoint=CheckpointConfig(checkpoints, every=2) if checkpoints else None,
            optimizer_device=optimizer,
        ),
        mesh=mesh,
        init_from=init_from,
        token_log=log,
    )
    if fails is not None and not world.leads:
        run_out_of_memory(trainer, fails, patch)
    if world.leads:
        trainer.optimizer.take_weights()  # the others have no reason to ask
    trainer.train_sync(steps)
    weights = {name: tensor.clone() for name, tensor in ModelWeights(model)}
    if world.leads:
        first = inner.versions[0]
        assert inner.versions == sorted([*range(first, steps + 1), *loses_after])
        save_file(weights, path)
    trainer.close()
    if log is not None:
        log.close()


def main(jobs: list[dict[str, Any]]) -> None:
    """Does one job after the other, since a start of two ranks takes longer than any of them.
    A file that is `lost` is gone before its job begins."""
    torch.set_num_threads(1)
    mesh = init_mesh("cpu", timeout_s=60)
    logger = logging.getLogger("ludic")
    rank = torch.distributed.get_rank()
    for job in jobs:
        if (lost := job.pop("lost", None)) and rank == 0:
            Path(lost).unlink()
        torch.distributed.barrier()
        warnings = Warnings(Path(job["out"]).with_suffix(f".warnings-{rank}"))
        logger.addHandler(warnings)
        with pytest.MonkeyPatch.context() as patch:
            train(mesh, patch, **job)
        logger.removeHandler(warnings)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
