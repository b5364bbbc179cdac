"""Policies by HTTP as differences: the same file to the bit, or the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ludic.pipeline.policies import PolicyFolder, StoredPolicy
from ludic.pipeline.store import PipelineConfig
from ludic.pipeline.weights_difference import DifferenceServer
from ludic.pipeline.weights_fetcher import PolicyFetcher
from ludic.plumbing.files import file_checksum

pytestmark = pytest.mark.redis


class Trainer:
    """Publishes weights of which a few elements change."""

    def __init__(self, folder: Path) -> None:
        self.server, self.folder = DifferenceServer("key"), PolicyFolder(folder)
        self.weights = torch.randn(1000, 100, dtype=torch.bfloat16)
        self.version = 0

    def publish(self) -> StoredPolicy:
        self.version += 1
        self.weights[self.version, :5] += 1
        tensors = {"weights": self.weights, "same": torch.ones(7)}
        facts = self.folder.write(tensors.items(), attempt=1, version=self.version)
        facts |= self.server.offer(Path(facts["path"]), facts["checksum"])
        return StoredPolicy(self.version, 1, self.version, **{**facts, "path": "/elsewhere"})


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "trainer")
    yield made
    made.server.close()


@pytest.fixture
def host(config: PipelineConfig, tmp_path: Path) -> Iterator[PolicyFetcher]:
    fetcher = PolicyFetcher(config, tmp_path / "host")
    yield fetcher
    fetcher.close()


def test_a_host_that_has_the_policy_before_fetches_what_changed(
    trainer: Trainer, host: PolicyFetcher
) -> None:
    host.fetch(trainer.publish())
    for _ in range(3):
        before, policy = trainer.server.sent, trainer.publish()
        here = host.fetch(policy)
        assert file_checksum(Path(here.path)) == policy.checksum
        assert 0 < trainer.server.sent - before < 2000
    assert sorted(path.suffix for path in trainer.folder.path.iterdir()) == [".safetensors"] * 2
    assert host._cache is not None
    left = sorted(path.suffix for path in host._cache.path.iterdir())
    assert left == ["", ".lock", ".lock", ".safetensors", ".safetensors"]  # one is the cache's lock


def test_a_host_that_missed_a_policy_fetches_the_whole_one(
    trainer: Trainer, host: PolicyFetcher
) -> None:
    host.fetch(trainer.publish())
    trainer.publish()
    before, policy = trainer.server.sent, trainer.publish()
    assert file_checksum(Path(host.fetch(policy).path)) == policy.checksum
    assert trainer.server.sent - before > 200_000


def test_a_difference_that_gives_another_policy_is_followed_by_the_whole_one(
    trainer: Trainer, host: PolicyFetcher, caplog: pytest.LogCaptureFixture
) -> None:
    first = host.fetch(trainer.publish())
    policy = trainer.publish()
    data = bytearray(Path(first.path).read_bytes())
    data[-1] ^= 1  # the host's copy of the policy before is damaged
    Path(first.path).write_bytes(data)
    assert file_checksum(Path(host.fetch(policy).path)) == policy.checksum
    assert "policy 2 is fetched whole; its difference: it gives another policy" in caplog.text


def test_nothing_is_compared_while_nobody_fetches(trainer: Trainer) -> None:
    trainer.publish()
    assert not trainer.publish().difference
