"""A real redis-server for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludic.pipeline.local_redis import LocalRedis
from ludic.pipeline.store import PipelineConfig, Store


@pytest.fixture(autouse=True)
def _elsewhere(elsewhere: Path) -> None:
    """A trainer that was told no `run_dir` makes a folder below the working directory."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    """One server for the tests that do not disturb it."""
    folder = tmp_path_factory.mktemp("redis")
    with LocalRedis(folder) as running:
        yield running
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LocalRedis]:
    """A server that the test may kill, pause or fill."""
    with LocalRedis(tmp_path / "redis") as running:
        yield running


@pytest.fixture
def config(server: LocalRedis, request: pytest.FixtureRequest) -> PipelineConfig:
    """A run with a name that no other test uses."""
    name = f"test-{abs(hash(request.node.nodeid))}"
    return PipelineConfig(server.url, name, patience_s=10.0)


@pytest.fixture
def store(config: PipelineConfig) -> Iterator[Store]:
    with_redis = Store(config)
    yield with_redis
    with_redis.forget()
    with_redis.close()
