"""What an update waits for, and what it needs to know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from torch import Tensor

from ludic.inference.tiny import tiny_model
from ludic.saw.items import SAWBatch
from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment.returns import ConstantCredit
from ludic.training.trainer import Trainer
from ludic.training.types import LossBatch, LossStats, TokenLogProbs
from tests.training.synthetic import (
    RecordingPublisher,
    SyntheticSource,
    reinforce,
    synthetic_batch,
)
from tests.training.test_trainer import Remembering, config, train


class Updated(RecordingPublisher):
    """Notes when the weights are updated, and lets a source wait for that."""

    def __init__(self, shares_weights: bool) -> None:
        super().__init__()
        self.shares_weights = shares_weights
        self.diary: list[str] = []
        self.updated = asyncio.Event()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        self.diary.append("update")
        self.updated.set()
        yield


class Second(SyntheticSource):
    """Its second batch takes until the first update, where `wait` says so, or a while."""

    def __init__(self, publisher: Updated, wait: bool) -> None:
        super().__init__()
        self.publisher, self.wait = publisher, wait

    async def next_batch(self) -> SAWBatch:
        batch = await super().next_batch()
        if self.count == 2:
            await (self.publisher.updated.wait() if self.wait else asyncio.sleep(0.2))
            self.publisher.diary.append("second batch")
        return batch


@pytest.mark.parametrize("shares", [True, False])
def test_only_a_sampler_that_shares_the_weights_is_waited_for_before_they_change(
    tmp_path: Path, shares: bool
) -> None:
    publisher = Updated(shares)
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=Second(publisher, wait=not shares),
        publisher=publisher,
        cfg=config(tmp_path, overlap=True, batch_timeout_s=60),
    )
    trainer.train_sync(2)
    trainer.close()
    first = ["second batch", "update"] if shares else ["update", "second batch"]
    assert publisher.diary == [*first, "update"]


def test_a_source_that_had_nothing_left_costs_no_step_of_the_next_call(tmp_path: Path) -> None:
    class Empty(SyntheticSource):
        async def next_batch(self) -> SAWBatch:
            raise StopAsyncIteration

    async def both() -> None:
        await trainer.train()
        assert trainer.step == 0
        trainer.source = SyntheticSource()
        await trainer.train(1)

    trainer = Trainer(
        model=tiny_model(), algo=reinforce(), batch_source=Empty(), cfg=config(tmp_path)
    )
    asyncio.run(both())
    trainer.close()
    assert trainer.step == 1


@pytest.mark.parametrize("epochs", [1, 2])
def test_one_update_needs_no_proximal_log_probs_and_two_do(tmp_path: Path, epochs: int) -> None:
    loss = Remembering()
    algo = RLAlgorithm("mine", ConstantCredit(), loss)  # type: ignore[arg-type]
    train(synthetic_batch(0, 2), config(tmp_path, epochs=epochs), algo)
    assert {b.proximal_logprobs is None for _, b in loss.seen} == {epochs == 1}


class Raising(Remembering):
    """Raises at its second call."""

    needs_logits = False

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        if len(self.seen) == 1:
            self.seen.append((policy, batch))
            raise ValueError("no loss of this")
        return super().compute(policy, batch)


async def test_a_step_that_raised_halfway_leaves_no_gradient_to_the_next(tmp_path: Path) -> None:
    norms = []
    for number, loss in enumerate((Raising(), Remembering())):
        source = SyntheticSource()
        trainer = Trainer(
            model=tiny_model(),
            algo=RLAlgorithm("mine", ConstantCredit(), loss),  # type: ignore[arg-type]
            batch_source=source,
            cfg=config(tmp_path / str(number), micro_token_budget=64),
        )
        if isinstance(loss, Raising):
            with pytest.raises(ValueError, match="no loss of this"):
                await trainer.train_step()
            assert len(loss.seen) == 2
        source.count = 1
        norms.append((await trainer.train_step())["train/grad_norm"])
        trainer.close()
    assert norms[0] == norms[1]
