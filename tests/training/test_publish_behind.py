"""A trainer whose weights are published behind its back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.distributed import BackgroundPublisher
from ludic.distributed.interfaces import PublishReport, Snapshot, Weights
from ludic.errors import PublishError
from ludic.inference.tiny import tiny_model
from ludic.saw.items import SAWBatch
from ludic.sharding.world import PeerError, World
from ludic.training import Trainer
from tests.training.synthetic import RecordingPublisher, SyntheticSource, reinforce
from tests.training.test_trainer import config


class Diary(RecordingPublisher):
    """Takes a while for every publish, or until it is let; what fails, fails at its end."""

    snapshots = "host"

    def __init__(self, *, held: bool = False, fails: int | None = None) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.held, self.fails = held, fails
        self.release = asyncio.Event()

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        assert isinstance(weights, Snapshot)
        self.lines.append(f"begin {version}")
        if self.held and version:
            await self.release.wait()
        else:
            await asyncio.sleep(0.01)
        if version == self.fails:
            raise PublishError("http://gpu-7:8000 went away")
        report = await super().publish(weights, version)
        self.lines.append(f"end {version}")
        return report


class Sampled(SyntheticSource):
    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.lines = diary.lines

    async def next_batch(self) -> SAWBatch:
        self.lines.append(f"batch {self.count + 1}")
        return await super().next_batch()


class Stored(Sampled):
    waits_for_publish = False


def trained(
    source: SyntheticSource, publisher: Any, path: Path, *, steps: int = 3, **settings: Any
) -> Trainer:
    trainer = Trainer(
        model=tiny_model(layers=1, hidden_size=32),
        algo=reinforce(),
        batch_source=source,
        publisher=publisher,
        cfg=config(path, **settings),
    )
    try:
        trainer.train_sync(steps)
    finally:
        trainer.close()
    return trainer


def test_a_batch_that_is_sampled_waits_for_the_publish(tmp_path: Path) -> None:
    diary = Diary()
    trained(Sampled(diary), BackgroundPublisher(diary), tmp_path)
    of = [[f"begin {v}", f"end {v}", f"batch {v + 1}"] for v in range(3)]
    assert diary.lines == [*of[0], *of[1], *of[2], "begin 3", "end 3"]


def test_with_overlap_only_the_next_batch_waits(tmp_path: Path) -> None:
    diary = Diary()
    trained(Sampled(diary), BackgroundPublisher(diary), tmp_path, overlap=True)
    for version, batch in ((0, 1), (0, 2), (1, 3)):
        assert diary.lines.index(f"end {version}") < diary.lines.index(f"batch {batch}")
    assert diary.versions == [0, 1, 2, 3]


def test_stored_batches_do_not_wait_and_the_newest_weights_arrive(tmp_path: Path) -> None:
    diary = Diary(held=True)

    class LastLetsGo(Stored):
        async def next_batch(self) -> SAWBatch:
            if self.count == 3:
                diary.release.set()
            return await super().next_batch()

    trainer = trained(LastLetsGo(diary), BackgroundPublisher(diary), tmp_path, steps=4)
    assert diary.versions[:2] == [0, 1]
    assert diary.versions[-1] == 4
    assert 2 not in diary.versions  # replaced before it began
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(diary.weights[-1][name], parameter)


def test_synchronous_training_gives_the_same_bits_either_way(tmp_path: Path) -> None:
    behind, direct = Diary(), RecordingPublisher()
    first = trained(Sampled(behind), BackgroundPublisher(behind), tmp_path / "a")
    second = trained(SyntheticSource(), direct, tmp_path / "b")
    for name, parameter in first.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name))
    assert behind.versions == direct.versions
    for ours, theirs in zip(behind.weights, direct.weights, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("kind", "fails"), [(Sampled, 1), (Stored, 1), (Sampled, 3)])
def test_a_failure_behind_it_stops_the_run_with_the_servers_name(
    tmp_path: Path, kind: type[Sampled], fails: int
) -> None:
    diary = Diary(fails=fails)
    with pytest.raises(PublishError, match=f"version {fails} was not .*gpu-7:8000 went away"):
        trained(kind(diary), BackgroundPublisher(diary), tmp_path)
    assert diary.versions == list(range(fails))


def test_a_run_that_fails_leaves_no_publish_under_way(tmp_path: Path) -> None:
    diary = Diary(held=True)

    class Broken(Stored):
        async def next_batch(self) -> SAWBatch:
            if self.count == 2:
                raise RuntimeError("no more")
            return await super().next_batch()

    publisher = BackgroundPublisher(diary)
    with pytest.raises(RuntimeError, match="no more"):
        trained(Broken(diary), publisher, tmp_path)
    assert publisher.state_dict() == {"published": 0, "on_their_way": []}
    assert diary.versions == [0]


async def test_who_trains_on_after_a_failure_begins_with_the_newest_weights(tmp_path: Path) -> None:
    diary = Diary(held=True)

    class BrokenOnce(Stored):
        async def next_batch(self) -> SAWBatch:
            if self.count == 2 and not diary.release.is_set():
                raise RuntimeError("not now")
            return await super().next_batch()

    trainer = Trainer(
        model=tiny_model(layers=1, hidden_size=32),
        algo=reinforce(),
        batch_source=BrokenOnce(diary),
        publisher=BackgroundPublisher(diary),
        cfg=config(tmp_path),
    )
    with pytest.raises(RuntimeError, match="not now"):
        await trainer.train(4)
    assert (trainer.version, diary.versions) == (2, [0])
    diary.release.set()
    await trainer.train(1)
    assert diary.versions[:2] == [0, 2]
    assert diary.versions[-1] == trainer.version
    trainer.close()


class Told(World):
    """As on a rank other than the one whose publish has failed."""

    def agree(self, error: BaseException | None) -> None:
        raise error or PeerError("another rank failed")


async def test_a_rank_that_publishes_nothing_hears_that_rank_0_could_not(tmp_path: Path) -> None:
    trainer = Trainer(
        model=tiny_model(layers=1, hidden_size=32),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=config(tmp_path),
    )
    trainer.world = Told()
    with pytest.raises(PeerError):
        await trainer.start()
    trainer.publisher = BackgroundPublisher(Diary(fails=0))
    with pytest.raises(PublishError, match="gpu-7:8000 went away"):
        await trainer.start()
    trainer.close()
