"""Run by torchrun from test_fsdp.py: a few steps over gloo, results written as safetensors."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


def watch_warnings() -> None:
    """Prints what is said as a warning, one line for each."""

    class Printed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print("WARNING", record.getMessage(), flush=True)

    logging.getLogger("ludic").addHandler(Printed(logging.WARNING))


def run_out_of_memory(trainer: Trainer, where: str) -> None:
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

        trainer.passes.recovery._has_room = has_room  # type: ignore[assignment, method-assign]
    elif where == "head":
        reduce = logprobs._reduce

        def failing(*args: Any) -> Any:
            fail()
            return reduce(*args)

        failing.__name__ = "_reduce"
        logprobs._reduce = failing  # type: ignore[assignment]
    else:
        decoder_layers(trainer.model)[int(where)].register_forward_pre_hook(fail)


def main(
    out: Path,
    steps: int,
    dtype: str,
    checkpoints: str,
    init_from: str = "-",
    prompt: str = "0",
    optimizer: str = "-",
    fails: str = "-",
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
            optimizer_device="cpu" if optimizer == "cpu" else None,
        ),
        mesh=mesh,
        init_from=None if init_from == "-" else init_from,
        token_log=log,
    )
    if fails != "-":
        watch_warnings()
        if not world.leads:
            run_out_of_memory(trainer, fails)
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
