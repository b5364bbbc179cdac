"""Servers that register with a run: they join by a publish, restart, leave, and want the run's
key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ludic.distributed import ModelWeights
from ludic.distributed.deadlines import limit_of
from ludic.distributed.engine_server import EngineServer
from ludic.errors import ConfigError
from ludic.inference.local import LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import free_port
from ludic.pipeline import LocalRedis
from ludic.pipeline.policies import PipelinePublisher
from ludic.pipeline.servers import RegisteredServer, Registration, list_servers
from ludic.pipeline.store import Store
from ludic.plumbing.records import to_json
from ludic.runs.pipeline.address import find_pipeline, key_of_servers
from ludic.runs.pipeline.roster import Roster, ServerWatch
from ludic.runs.pipeline.serving import flags_of, serve
from ludic.runs.settings import RunConfig, check_run
from ludic.runs.settings.deadlines import publish_limit_s
from ludic.runs.vllm_backend import open_vllm
from ludic.training.batching.source import PolicyLostError
from tests.inference.vllm.asking import request, trace_of
from tests.inference.vllm.fake_server import FakeVLLM

RUN: dict[str, Any] = {
    "model": {"name": "tiny", "precision": "float32"},
    "env": {"kind": "key_door"},
    "inference": {"backend": "vllm", "servers": "registered", "slots": 4},
    "pipeline": {},
}


@pytest.fixture
def config(server: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("LUDIC_REDIS_URL", server.url)
    return check_run(RUN)


@asynccontextmanager
async def served(
    config: RunConfig, folder: Path, store: Store, port: int | None = None
) -> AsyncIterator[str]:
    """An engine with weights of its own, registered with the run in `folder`."""
    model, tokenizer = tiny_model(11), tiny_tokenizer()
    key, port = key_of_servers(config, folder)[1], port or free_port()
    async with LocalChatClient(model, tokenizer, max_slots=4, on_update="continue") as engine:
        server = EngineServer(engine, model, tokenizer, name="tiny", key=key)
        runner = web.AppRunner(server.app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        url = f"http://127.0.0.1:{port}"
        registration = Registration(store, url, model="tiny", capacity=4, key=key, renew_s=0.1)
        await asyncio.to_thread(registration.__enter__)
        try:
            yield url
        finally:
            await asyncio.to_thread(registration.__exit__)
            await runner.cleanup()


async def until_version(store: Store, url: str, version: int | None) -> None:
    for _ in range(1200):
        if {s.url: s.version for s in list_servers(store)}.get(url, -1) == version:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{url} does not have version {version}: {list_servers(store)}")


def urls(client: VLLMChatClient) -> set[str]:
    """Those that may serve, once they are asked for their weights."""
    return {replica.url for replica in client.replicas if replica.out is None}


@pytest.mark.redis
@pytest.mark.timeout(300)
async def test_servers_join_by_a_publish_restart_and_leave_while_actors_sample(
    config: RunConfig, tmp_path: Path
) -> None:
    model = tiny_model(0)
    store = Store(find_pipeline(config, tmp_path))
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        first = AsyncExitStack()
        stack.push_async_callback(first.aclose)
        a = await first.enter_async_context(served(config, tmp_path, store))
        actor_roster = Roster(config, tmp_path, published=True)
        stack.callback(actor_roster.close)
        with pytest.raises(TimeoutError, match="weights to be published"):
            await actor_roster.wait(0.0)

        opened: Any = await open_vllm(config, model, tiny_tokenizer(), stack, tmp_path)
        client, publisher = opened
        assert urls(client) == {a}
        # What actors take for granted of the trainer: they wait for no less than it may take.
        announcing: Any = PipelinePublisher(None, publisher, timeout_s=600.0)  # type: ignore[arg-type]
        assert limit_of(announcing, 0.0) == publish_limit_s(config)
        actor = VLLMChatClient(await actor_roster.wait(60), api_key=actor_roster.key, version=-1)
        await stack.enter_async_context(actor)
        await actor_roster.update(actor)

        b = await stack.enter_async_context(served(config, tmp_path, store))
        await actor_roster.update(actor)
        assert urls(actor) == {a}, "a server with weights of its own is nobody's policy"
        report = await publisher.publish(ModelWeights(model), 1)
        assert set(report.details["servers"]) == {a, b}
        await until_version(store, b, 1)
        await actor_roster.update(actor)
        assert urls(actor) == {a, b}

        await first.aclose()  # and again at the same address, with nothing published to it
        port = int(a.rpartition(":")[2])
        again = served(config, tmp_path, store, port)
        assert await first.enter_async_context(again) == a
        await actor_roster.update(actor)
        assert urls(actor) == {b}
        await publisher.publish(ModelWeights(model), 2)
        await until_version(store, a, 2)
        await actor_roster.update(actor)
        assert urls(actor) == {a, b} == urls(client)

        await first.aclose()
        await actor_roster.update(actor)
        trace = trace_of(await actor.complete_tokens(request()))
        assert [span.version for span in trace.version_spans] == [2]
        report = await publisher.publish(ModelWeights(model), 3)
        assert report.details["servers"] == [b]
        assert report.details["lost"] == {}, "one that has left is not missed"


@pytest.mark.redis
async def test_the_trainer_hears_that_no_server_has_its_policy(
    config: RunConfig, tmp_path: Path
) -> None:
    store = Store(find_pipeline(config, tmp_path))
    watch = ServerWatch(store, patience_s=0.0)

    async def look(version: int, *, publishing: bool = False) -> None:
        await watch.look(version, publishing=publishing)
        await asyncio.sleep(0.001)
        watch.check()

    def has(url: str, version: int | None) -> None:
        note = to_json(RegisteredServer(url, "one", "tiny", 4, version)).decode()
        store.run("note", "servers", url, note)

    await look(3)  # none is there: a run that starts
    has("http://a", None)
    await look(3, publishing=True)
    with pytest.raises(PolicyLostError, match=r"version 3 .*\(http://a none\)"):
        await look(3)
    watch.check()  # said once, then it looks again
    has("http://b", 3)
    await look(3)
    has("http://b", 2)  # one that a publish has lost
    with pytest.raises(PolicyLostError, match="http://a none, http://b 2"):
        await look(3)
    patient = ServerWatch(store, patience_s=3600.0)
    await patient.look(3, publishing=False)
    patient.check()
    store.close()


@pytest.mark.redis
@pytest.mark.timeout(300)
async def test_a_publish_waits_for_the_only_server_to_start_again_before_its_own_deadline_begins(
    config: RunConfig, tmp_path: Path
) -> None:
    model, store = tiny_model(0), Store(find_pipeline(config, tmp_path))
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        async with served(config, tmp_path, store):
            opened: Any = await open_vllm(config, model, tiny_tokenizer(), stack, tmp_path)
            publisher, patient_s = opened[1], opened[1].timeout_s
        publisher.timeout_s = 0.001
        publish = asyncio.create_task(publisher.publish(ModelWeights(model), 1))
        await asyncio.wait([publish], timeout=1.0)
        assert not publish.done()
        publisher.timeout_s = patient_s
        url = await stack.enter_async_context(served(config, tmp_path, store))
        report = await publish
        assert report.details["servers"] == [url]


async def test_a_request_waits_for_a_server_that_comes() -> None:
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVLLM(version="1").serving())
        client = VLLMChatClient("http://127.0.0.1:1")
        stack.push_async_callback(client.close)
        client.set_servers({})
        asked = asyncio.create_task(client.complete_tokens(request()))
        await asyncio.sleep(0)
        client.set_servers({fake.url: "started"})
        assert trace_of(await asked).completion_token_ids


def test_the_key_is_drawn_once_and_for_this_user(config: RunConfig, tmp_path: Path) -> None:
    path, key = key_of_servers(config, tmp_path)
    assert path is not None
    assert path.stat().st_mode & 0o077 == 0
    assert key is not None
    assert len(key) >= 32
    assert key_of_servers(config, tmp_path) == (path, key)
    assert key_of_servers(config, None) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--engine", "local"], "--register"),
        (["--register", "RUN", "--host", "0.0.0.0"], "cannot be reached by others"),
        (["--register", "RUN", "--host", "10.0.0.1"], "without a key"),
        (["--register", "tic-tac-toe"], "which of its runs"),
        (["--register", "RUN", "--engine", "local", "--max-num-seqs", "3"], "from the run"),
        (["--register", "RUN", "--pass-on", "192.0.2.1"], "an address of this machine"),
        (["tiny", "--pass-on", "0.0.0.0"], "--pass-on='0.0.0.0' names no machine"),
    ],
)
def test_serve_says_what_is_missing(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDIC_REDIS_URL", "redis://127.0.0.1:1/0")
    file = tmp_path / "run.toml"
    file.write_text('[env]\nkind = "key_door"\n[pipeline]\nname = "mine"\n')
    with pytest.raises(ConfigError, match=why):
        serve([str(file) if part == "RUN" else part for part in arguments])


def test_a_registered_vllm_server_has_the_runs_settings_and_those_given_win() -> None:
    vllm = {"flags": {"max_num_batched_tokens": 2048}}
    config = check_run({**RUN, "inference": {**RUN["inference"], "vllm": vllm}})
    flags = flags_of(config, ["other", "--max-num-seqs", "9"])
    assert flags[:4] == ["--model", "tiny", "--served-model-name", "tiny"]
    assert flags[-4:] == ["--model", "other", "--max-num-seqs", "9"]
    assert "--max-num-batched-tokens" in flags


def test_a_run_without_a_redis_says_what_registered_servers_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LUDIC_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="a Redis that is there before the run"):
        Roster(check_run(RUN), tmp_path)
