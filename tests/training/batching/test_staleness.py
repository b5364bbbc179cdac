"""The age of samples is bounded for every token that is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from ludic.errors import BatchError
from ludic.inference.tiny import tiny_model
from ludic.saw.items import UNKNOWN_VERSION, SAWBatch
from ludic.training.batching.offline_batch_source import OfflineBatchSource
from ludic.training.batching.replay_buffer import ReplayBufferSource
from ludic.training.batching.source import lag_of
from ludic.training.trainer import Trainer
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Message,
    Rollout,
    TokenTrace,
    VersionSpan,
)
from tests.training.synthetic import SyntheticSource, reinforce, synthetic_batch
from tests.training.test_trainer import config


@pytest.mark.parametrize(("lag", "max_lag"), [(1, 0), (2, 1), (4, 3)])
def test_no_token_older_than_max_lag_is_trained_on(tmp_path: Path, lag: int, max_lag: int) -> None:
    def trainer(bound: int | None) -> Trainer:
        return Trainer(
            model=tiny_model(),
            algo=reinforce(),
            batch_source=SyntheticSource(lag=lag),
            cfg=config(tmp_path, max_lag=bound),
        )

    late = trainer(max_lag)
    with pytest.raises(BatchError, match=rf"{lag} versions old, over max_lag={max_lag}"):
        late.train_sync(8)
    assert late.step == lag  # up to there, the first policy is not too old
    for bound in (lag, None):
        in_time = trainer(bound)
        in_time.train_sync(6)
        assert in_time.step == 6
        in_time.close()
    late.close()


def test_one_old_token_among_new_ones_is_enough(tmp_path: Path) -> None:
    class OneOld(SyntheticSource):
        async def next_batch(self) -> SAWBatch:
            batch = await super().next_batch()
            last = batch.items[-1].attachments.versions
            assert last is not None
            last[-1] = max(self.count - 3, 0)
            return batch

    trainer = Trainer(
        model=tiny_model(), algo=reinforce(), batch_source=OneOld(), cfg=config(tmp_path)
    )
    with pytest.raises(BatchError, match="so are 1 of the batch's 6 samples"):
        trainer.train_sync(4)
    trainer.close()


def test_what_a_replay_buffer_gives_back_has_its_own_bound(tmp_path: Path) -> None:
    source = ReplayBufferSource(SyntheticSource(), share=0.5, max_age=4)
    trainer = Trainer(
        model=tiny_model(), algo=reinforce(), batch_source=source, cfg=config(tmp_path, max_lag=0)
    )
    trainer.train_sync(5)
    trainer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert max(line["train/replay_age_max"] for line in lines[1:]) > 1


def test_versions_of_another_run_are_not_compared_with_the_trainers(tmp_path: Path) -> None:
    stored = [recorded(number, version=number) for number in range(6)]
    source = OfflineBatchSource(stored, algorithm=reinforce(), batch_size=1, epochs=2)
    trainer = Trainer(model=tiny_model(), batch_source=source, cfg=config(tmp_path, max_lag=0))
    trainer.train_sync()
    assert trainer.version == 12
    trainer.close()


def recorded(number: int, version: int) -> Rollout:
    """A rollout of one turn, as a policy of that version said it."""
    trace = TokenTrace((1, 2, 3), (4, 5), (-1.0, -1.0), (VersionSpan(0, 2, version),))
    said = AgentStep(0, (), Message(role="assistant", content="a"), FinishReason.STOP, trace)
    heard = EnvironmentStep(0, (0,), "", "a", "", 1.0, terminated=True)
    return Rollout(f"r{number}", (said, heard), episode_id=f"e{number}", agent_id="a")


def test_a_version_that_was_not_recorded_is_not_counted() -> None:
    item = synthetic_batch(0).items[0]
    assert item.attachments.versions is not None
    assert lag_of([item], 7) == 7
    versions = np.full_like(item.attachments.versions, UNKNOWN_VERSION)
    unknown = replace(item, attachments=replace(item.attachments, versions=versions))
    assert lag_of([unknown], 7) == 0
    versions[-1] = 5
    assert lag_of([unknown], 7) == 2
    assert lag_of([unknown], 3) == 0  # of a trainer that was lost
