"""A run whose actors may be elsewhere serves its policies, where `pipeline.policy_address` says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.distributed import BroadcastPolicyPublisher, ModelWeights
from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.pipeline.local_redis import LocalRedis
from ludic.pipeline.policies import StoredPolicy
from ludic.pipeline.status import process_rows, read_status
from ludic.pipeline.weights_fetcher import PolicyFetcher
from ludic.plumbing.files import file_checksum
from ludic.runs.locate import read_run
from ludic.runs.pipeline.address import URL_VARIABLE
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


async def test_redis_names_the_address_from_which_servers_fetch_and_not_the_key(
    server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, server.url)
    async with (
        make_pipeline(tmp_path / "run") as pipeline,
        served() as url,
        VLLMChatClient(url, model="tiny", api_key=KEY) as client,
    ):
        inner = BroadcastPolicyPublisher(client, plane="http", **PATIENT)
        publisher = pipeline.publisher(inner)
        await publisher.publish(ModelWeights(tiny_model(5)), 3)
        await publisher.settle()
        pipeline.lease._tell_facts()  # as it does every few seconds
        status = read_status(pipeline.lease.store)
        payload: Any = inner.payload
        plane = payload.plane
        assert status.trainer["weights_at"] == plane.url != ""
        assert plane._server.key not in str(pipeline.lease.store.facts()["meta"])
        assert f"weights at {plane.url}" in str(process_rows(status)[0])
        plane.close()


async def test_an_address_of_another_machine_is_refused_before_anything_starts(
    server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, server.url)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*pipeline\.policy_address"):
        async with make_pipeline(tmp_path / "run", 'pipeline.policy_address="192.0.2.1"'):
            pass
