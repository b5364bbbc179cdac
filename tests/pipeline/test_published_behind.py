"""Policies that are still on their way: what actors wait for, and how old samples count."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.distributed import BackgroundPublisher
from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Weights
from ludic.errors import PublishError
from ludic.inference.tiny import tiny_model
from ludic.pipeline import Bounds, PipelineConfig, PipelinePublisher
from ludic.pipeline.local_redis import LocalRedis
from ludic.pipeline.store import Store
from ludic.runs.pipeline.address import URL_VARIABLE
from ludic.training import CheckpointConfig, Trainer, TrainerConfig
from tests.pipeline.test_batch_source import acting, until, weights_of
from tests.pipeline.test_policy_address import make_pipeline
from tests.pipeline.world import make_source

pytestmark = pytest.mark.redis


class Late(PipelinePublisher):
    """Announces a policy a while after it was told of it; from `stuck` on never."""

    stuck = 10**9
    begun = 0

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        self.begun = version
        await (asyncio.Event().wait() if version >= self.stuck else asyncio.sleep(0.1))
        return await super().publish(weights, version)


@pytest.mark.parametrize("max_lag", [0, 1, 2])
async def test_no_sample_is_older_than_max_lag_while_policies_are_on_their_way(
    config: PipelineConfig, store: Store, max_lag: int
) -> None:
    source = make_source(config, every=100, bounds=Bounds(200), max_lag=max_lag, stale="wait")
    publisher = BackgroundPublisher(Late(source.lease))
    await publisher.publish({}, 0)
    await publisher.settle()
    lags = []
    async with acting(config, 2):
        for version in range(1, 6):
            batch = await source.next_batch()
            lags.append(int(batch.meta["train/pipeline_lag_max"]))
            await publisher.publish({}, version)
    await publisher.settle()
    await source.close()
    assert max(lags) <= max_lag
    assert not source.ledger.dropped  # they waited, and none was sampled in vain
    assert source.lease.version == 5


async def test_a_publish_that_failed_is_seen_while_the_trainer_waits_for_a_batch(
    server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(PolicyPublisher):
        snapshots = "host"

        async def publish(self, weights: Weights, version: int) -> PublishReport:
            raise PublishError("http://gpu-7:8000 refused")

    monkeypatch.setenv(URL_VARIABLE, server.url)
    async with make_pipeline(tmp_path / "run") as pipeline:
        publisher = pipeline.publisher(Refusing())
        await publisher.publish({"a": torch.ones(1)}, 1)
        pipeline._alarm()
        with pytest.raises(PublishError):
            await publisher.settle()
        with pytest.raises(PublishError, match=r"version 1 was not published .*gpu-7:8000 refused"):
            pipeline._alarm()


def trainer_of(source: Any, publisher: Any, folder: Path) -> Trainer:
    return Trainer(
        model=tiny_model(),
        batch_source=source,
        publisher=publisher,
        cfg=TrainerConfig(
            learning_rate=1e-3, max_seq_len=512, checkpoint=CheckpointConfig(folder, every=1)
        ),
    )


async def test_a_trainer_that_ends_between_copy_and_publish_goes_on_from_its_checkpoint(
    config: PipelineConfig, store: Store, tmp_path: Path
) -> None:
    source = make_source(config, max_lag=0, every=1)
    late = Late(source.lease)
    late.stuck = 2
    trainer = trainer_of(source, BackgroundPublisher(late), tmp_path / "a")
    async with acting(config):
        training = asyncio.create_task(trainer.train(4))
        await until(lambda: late.begun == 2 and source.step == 2 and trainer._checkpoints)
        assert trainer._checkpoints is not None
        await until(lambda: trainer._checkpoints and trainer._checkpoints.last_step == 2)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await source.close()
        saved = [path.read_text().replace(" ", "") for path in (tmp_path / "a").rglob("*.json")]
        said = '"publisher":{"published":1,"on_their_way":[2]}'
        assert any(said in text for text in saved)
        again = make_source(config, max_lag=0, every=1)
        publisher = BackgroundPublisher(Late(again.lease))
        resumed = trainer_of(again, publisher, tmp_path / "a")
        await resumed.start()
        assert (resumed.step, publisher.published) == (2, 2)
        await resumed.train(4)
        await again.close()
    other = PipelineConfig(config.url, f"{config.run}-whole")
    whole = make_source(other, max_lag=0, every=1)
    straight = trainer_of(whole, PipelinePublisher(whole.lease), tmp_path / "b")
    async with acting(other):
        await straight.train(4)
    await whole.close()
    Store(other).forget()
    for trained in (trainer, resumed, straight):
        trained.close()
    ours, theirs = weights_of(resumed), weights_of(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
