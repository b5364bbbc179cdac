"""What the ranks beside rank 0 do in a run, and what all of them train in its cold start."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import nn

from ludic.plumbing.precision import float32_products
from ludic.runs.interruption import interruptible
from ludic.runs.model import precision_of
from ludic.runs.parts import RunParts
from ludic.runs.ranks import Ranks
from ludic.runs.storage import RunFolder
from ludic.sharding.weights import whole
from ludic.sharding.world import hearing_of_peers
from ludic.training import Trainer


async def follow(run: RunParts) -> None:
    """What the other ranks do: train along until rank 0 says it is over. A first Ctrl-C is rank 0's
    matter."""
    ranks = run.ranks
    with (
        interruptible(lambda: None, b""),
        float32_products(precision_of(run.config)),
        hearing_of_peers(ranks.world),
    ):
        _ = run.model  # loaded while rank 0 prepares
        while (message := await ranks.receive())["stage"] != "end":
            if run.parts.frozen is None:
                run.folder = RunFolder(Path(message["folder"]))
                run.parts.frozen = "the run has begun"
            if message["stage"] == "sft":
                with cold_start_copy(run.model, ranks) as model:
                    await _take_part(run.sft_trainer(model, None), message["version"])
            else:
                await _take_part(run.trainer, message["version"])


async def _take_part(trainer: Trainer, version: int) -> None:
    trainer.version = version
    with closing(trainer):
        await trainer.train()


@contextmanager
def cold_start_copy(model: nn.Module, ranks: Ranks) -> Iterator[nn.Module]:
    """Yields what the cold start trains: on several ranks a copy, since a module can be sharded
    once only, and the reinforcement shards the model. At the end the model has what was learnt."""
    if not ranks.several:
        yield model
        return
    trained = copy.deepcopy(model)
    device = next(model.parameters()).device
    model.to("cpu")
    yield trained
    with torch.no_grad():
        for own, learnt in zip(model.parameters(), trained.parameters(), strict=True):
            own.copy_(whole(learnt))
    model.to(device)
