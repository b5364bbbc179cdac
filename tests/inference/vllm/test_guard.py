"""The key before all routes of a server: as ASGI, as a flag, and as a client that servers join."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import Qwen2ForCausalLM

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import (
    GUARD,
    SWITCHING,
    ServerSettings,
    VLLMBuild,
    command_line,
    environment,
)
from ludic.inference.vllm.guard import KEY_FILE, KeyGuard
from ludic.sharding.weights import ModelWeights
from tests.inference.vllm.asking import PATIENT, request, trace_of
from tests.inference.vllm.conftest import NAME, tiny_server

BUILD = VLLMBuild("py", "0.32.0", cpu=True, has_plugin=True)


async def answered(guard: KeyGuard, kind: str, path: str, *headers: tuple[bytes, bytes]) -> Any:
    """The first thing that is sent back."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await guard({"type": kind, "path": path, "headers": headers}, send, send)
    return sent[0]


async def passed(scope: Any, receive: Any, send: Any) -> None:
    await send("passed")


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyGuard:
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    return KeyGuard(passed)


async def test_a_route_is_passed_on_with_the_key_alone(guard: KeyGuard) -> None:
    key = (b"Authorization", b"Bearer secret")
    assert await answered(guard, "http", "/update_weights", key) == "passed"
    assert await answered(guard, "lifespan", "") == "passed"
    assert await answered(guard, "http", "/health") == "passed"
    for wrong in (b"Bearer other", b"secret", b"Bearer", b"Basic secret", b"\xff"):
        seen = await answered(guard, "http", "/update_weights", (b"authorization", wrong))
        assert seen["status"] == 401
    assert (await answered(guard, "http", "/health/../update_weights"))["status"] == 401
    assert (await answered(guard, "websocket", "/v1/realtime"))["type"] == "websocket.close"


def test_vllm_gets_the_guard_by_name_and_the_key_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    settings = ServerSettings("m", key_file=str(tmp_path / "key"))
    command = command_line(settings, BUILD)
    added = [value for flag, value in pairwise(command) if flag == "--middleware"]
    assert added == [SWITCHING, GUARD], "the last one stands before the others"
    given = environment(settings, BUILD, tmp_path)
    assert given[KEY_FILE] == str(tmp_path / "key")
    assert "secret" not in " ".join(command) + "".join(given.values())
    assert GUARD not in command_line(ServerSettings("m"), BUILD)
    assert "--middleware" not in command_line(ServerSettings("m", live_updates=False), BUILD)


def test_servers_join_and_leave_and_one_that_was_started_again_is_another() -> None:
    client = VLLMChatClient(["http://a:1", "http://b:1"])
    first = client.replicas
    assert not client.set_servers({"http://a:1": "x", "http://b:1": "y"}, joining="new")
    assert client.replicas == first, "whose first registration only gives them a name"
    assert client.set_servers({"http://a:1": "x", "http://b:1": "z"}, joining="new")
    assert client.replicas[0] is first[0]
    assert client.replicas[1].out == "new"
    assert client.set_servers({"http://b:1": "z"}, joining="new")
    assert [replica.out for replica in client.replicas] == ["new"]
    assert client.set_servers({"http://b:1": "z"}), "those who publish nothing ask it again"
    assert [replica.out for replica in client.replicas] == [None]


@pytest.mark.vllm
@pytest.mark.timeout(1800)
async def test_a_real_server_changes_its_weights_for_those_with_the_key_alone(
    model_folder: Path, model: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret")
    closed = ["/pause", "/resume", "/start_weight_update", "/update_weights", "/collective_rpc"]
    closed += ["/finish_weight_update", "/init_weight_transfer_engine", "/v1/completions"]
    closed += ["/reset_prefix_cache", "/inference/v1/generate", "/openapi.json", "/metrics"]
    key_file = str(tmp_path / "key")
    with tiny_server(model_folder, tmp_path / "server.log", key_file=key_file) as server:
        async with aiohttp.ClientSession() as session:
            for path in closed:
                for headers in ({}, {"Authorization": "Bearer other"}):
                    async with session.post(server.url + path, headers=headers, json={}) as answer:
                        assert answer.status == 401, path
            async with session.get(server.url + "/health") as answer:
                assert answer.status == 200
        async with VLLMChatClient(server.url, model=NAME, api_key="secret") as client:
            publisher = BroadcastPolicyPublisher(client, **PATIENT)
            report = await publisher.publish(ModelWeights(model), 4)
            assert report.verified
            trace = trace_of(await client.complete_tokens(request()))
            assert [span.version for span in trace.version_spans] == [4]
