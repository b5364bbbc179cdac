"""Training ends where the batch source does, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ludic.distributed.interfaces import PublishReport, Weights
from ludic.errors import TrainingError
from ludic.inference.tiny import tiny_model
from ludic.saw.items import SAWBatch
from ludic.training.trainer import Trainer
from tests.training.synthetic import RecordingPublisher, SyntheticSource, reinforce
from tests.training.test_trainer import config


@pytest.mark.parametrize("where", ["evaluation", "preprocess", "publisher"])
async def test_an_iterator_that_runs_out_elsewhere_does_not_end_the_training(
    tmp_path: Path, where: str
) -> None:
    answers = aiter(EndsAfter(2))

    async def ask(*_: object) -> dict[str, float]:
        return {"eval/reward": await anext(answers)}

    class Asking(RecordingPublisher):
        async def publish(self, weights: Weights, version: int) -> PublishReport:
            await ask()
            return PublishReport(version, 0.0)

    def prepare(batch: SAWBatch) -> SAWBatch:
        if batch.items[0].attachments.versions[0] == 2:  # type: ignore[index]
            raise StopAsyncIteration
        return batch

    trainer = Trainer(
        model=tiny_model(),
        algo=replace(reinforce(), preprocess=prepare if where == "preprocess" else None),
        batch_source=SyntheticSource(),
        publisher=Asking() if where == "publisher" else None,
        evaluate=ask if where == "evaluation" else None,
        cfg=config(tmp_path, eval_every=1),
    )
    with pytest.raises(TrainingError, match="not from the batch source"):
        await trainer.train(5)
    assert trainer.step < 5
    trainer.close()


class EndsAfter:
    """An asynchronous iterator of so many numbers."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __aiter__(self) -> EndsAfter:
        return self

    async def __anext__(self) -> float:
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return 1.0
