"""A run whose actors may be elsewhere serves its policies, where `pipeline.policy_address` says."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludic.distributed import BroadcastPolicyPublisher, ModelWeights
from ludic.distributed.vllm.shared_memory import FetchedWeights
from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.pipeline.lease import TrainerLease
from ludic.pipeline.local_redis import LocalRedis
from ludic.pipeline.policies import StoredPolicy
from ludic.pipeline.store import PipelineConfig
from ludic.pipeline.weights_fetcher import PolicyFetcher
from ludic.plumbing.files import file_checksum
from ludic.runs.locate import read_run
from ludic.runs.pipeline.address import URL_VARIABLE
from ludic.runs.pipeline.status import read_status
from ludic.runs.pipeline.training import RunPipeline
from tests.distributed.test_engine_server import KEY, served
from tests.inference.vllm.asking import PATIENT

pytestmark = pytest.mark.redis


def make_pipeline(folder: Path, *settings: str) -> RunPipeline:
    config, _, _ = read_run("tic-tac-toe", ["pipeline.actors=0", *settings])

    def no_client() -> Any:
        raise AssertionError("no actor is started here")

    folder.mkdir(exist_ok=True)
    return RunPipeline(config, folder, no_client)


async def test_a_run_on_a_redis_of_its_own_choice_serves_its_policies(
    server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, server.url)
    async with make_pipeline(tmp_path / "run", "pipeline.policy_address=auto") as pipeline:
        publisher = pipeline.publisher(None)
        await publisher.publish({"a": torch.ones(3)}, 1)
        await publisher.settle()
        store = pipeline.lease.store
        policy = StoredPolicy.read(store.run("beat", "actor", "{}")[0])
        elsewhere = replace(policy, path="/on/another/host")
        fetcher = PolicyFetcher(store.config, tmp_path / "cache")
        try:
            assert file_checksum(Path(fetcher.fetch(elsewhere).path)) == policy.checksum
        finally:
            fetcher.close()
        assert policy.key not in repr(policy)


def becomes(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


async def test_redis_names_what_servers_fetch_for_as_long_as_they_can(
    server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, server.url)
    fetch, sources = FetchedWeights.fetch, list[Any]()
    async with (
        make_pipeline(tmp_path / "run") as pipeline,
        served() as url,
        VLLMChatClient(url, model="tiny", api_key=KEY) as client,
    ):
        store = pipeline.lease.store

        def looked_up(self: FetchedWeights, source: Any) -> Path:
            becomes(lambda: read_status(store).offer == source["url"])  # it is told in a thread
            sources.append((source, read_status(store).offer, store.facts()["meta"]))
            return fetch(self, source)

        monkeypatch.setattr(FetchedWeights, "fetch", looked_up)
        inner = BroadcastPolicyPublisher(client, plane="http", **PATIENT)
        publisher = pipeline.publisher(inner)
        await publisher.publish(ModelWeights(tiny_model(5)), 3)
        await publisher.settle()
        ((source, offer, meta),) = sources
        assert offer == source["url"]
        assert source["key"] not in str(meta), "Redis names no key"
        assert await asyncio.to_thread(becomes, lambda: read_status(store).offer == "")


def test_a_redis_that_does_not_answer_holds_up_no_publish_and_hears_the_newest(
    tmp_path: Path,
) -> None:
    pipeline, answers, told = make_pipeline(tmp_path / "run"), threading.Event(), list[str]()

    def hang(script: str, url: str, **_: Any) -> None:
        assert answers.wait(60.0)
        told.append(url)

    pipeline._lease = SimpleNamespace(run=hang)  # type: ignore[assignment]
    for url in ("http://first", "", "http://second", ""):
        pipeline._offer(url)
    assert not told
    answers.set()
    assert becomes(lambda: pipeline._offerer is None)
    assert told == ["http://first", ""]


def test_a_trainer_that_takes_the_run_or_leaves_it_removes_what_was_offered(
    config: PipelineConfig,
) -> None:
    killed = TrainerLease(config, lease_s=60.0)
    killed.acquire()
    killed.run("offer", "http://killed")
    store = killed.store
    assert read_status(store).offer == "http://killed"
    store._redis.delete(store.keys["trainer"])  # its lease has run out
    following = TrainerLease(config, lease_s=60.0)
    following.acquire()
    assert read_status(store).offer == ""
    killed.run("offer", "http://late")
    assert read_status(store).offer == "", "it holds the run no longer"
    following.run("offer", "http://here")
    following.close()
    assert read_status(store).offer == ""
    killed.close()


async def test_an_address_of_another_machine_is_refused_before_anything_starts(
    server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, server.url)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*pipeline\.policy_address"):
        async with make_pipeline(tmp_path / "run", 'pipeline.policy_address="192.0.2.1"'):
            pass
