"""What a run's other ranks do: train along with rank 0."""

from __future__ import annotations

from pathlib import Path

from ludic.plumbing.precision import float32_products
from ludic.runs.execution.interruption import interruptible
from ludic.runs.execution.pieces import RunPieces
from ludic.runs.execution.ranks import cold_start_copy
from ludic.runs.model import precision_of
from ludic.runs.storage.folder import RunFolder
from ludic.sharding.world import hearing_of_peers
from ludic.training import Trainer


async def follow(run: RunPieces) -> None:
    """Trains along with rank 0 until that says it is over. A first Ctrl-C is rank 0's matter."""
    crew = run.crew
    precision = precision_of(run.config)
    with (
        interruptible(lambda: None, b""),
        float32_products(precision),
        hearing_of_peers(crew.world),
    ):
        _ = run.model  # loaded while rank 0 prepares
        run._frozen = "the run has begun"
        while (word := await crew.hear())["stage"] != "end":
            run._built["folder"] = RunFolder(Path(word["folder"]))
            if word["stage"] == "sft":
                with cold_start_copy(run.model, crew) as model:
                    await _take_part(run.sft_trainer(model, None), word["version"])
            else:
                await _take_part(run.trainer, word["version"])


async def _take_part(trainer: Trainer, version: int) -> None:
    trainer.version = version
    try:
        await trainer.train()
    finally:
        trainer.close()
