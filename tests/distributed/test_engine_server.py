"""The in-process engine behind HTTP: our client samples from it, our publisher updates it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from ludic.distributed import BroadcastPolicyPublisher, ModelWeights, engine_server
from ludic.distributed.engine_server import EngineServer
from ludic.distributed.vllm.placement import Place
from ludic.errors import InferenceError, RequestRejectedError
from ludic.inference.local import LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import STAGE
from tests.inference.vllm.asking import PATIENT, request, scored, trace_of

KEY = "the key of this run"


@asynccontextmanager
async def served(seed: int = 0, key: str | None = KEY) -> AsyncIterator[str]:
    """The address of an engine with a model of its own."""
    model, tokenizer = tiny_model(seed), tiny_tokenizer()
    async with LocalChatClient(model, tokenizer, max_slots=4, on_update="continue") as engine:
        server = EngineServer(engine, model, tokenizer, name="tiny", key=key)
        async with TestServer(server.app) as http:
            yield str(http.make_url("")).rstrip("/")


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with served() as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient(url, model="tiny", api_key=KEY) as connected:
        await connected.connect(tokenizer=tiny_tokenizer())
        yield connected


async def test_tokens_and_log_probs_are_those_of_the_model(client: VLLMChatClient) -> None:
    trace = trace_of(await client.complete_tokens(request(temperature=0.7, stop_token_ids=(3,))))
    assert trace.completion_logprobs == pytest.approx(scored(tiny_model(0), trace, 0.7), abs=1e-4)
    assert [span.version for span in trace.version_spans] == [0]


@pytest.mark.parametrize("plane", ["shared_memory", "gloo", "http"])
async def test_a_publish_reaches_it_with_receipt_and_canary(
    client: VLLMChatClient, plane: str
) -> None:
    publisher = BroadcastPolicyPublisher(client, plane=plane, **PATIENT)  # type: ignore[arg-type]
    newer = tiny_model(5)
    report = await publisher.publish(ModelWeights(newer), 7)
    assert report.verified
    assert report.details["canary_max"] < 1e-3
    trace = trace_of(await client.complete_tokens(request()))
    assert [span.version for span in trace.version_spans] == [7]
    assert trace.completion_logprobs == pytest.approx(scored(newer, trace), abs=1e-4)
    assert await client.get_policy_version() == 7


async def test_the_library_has_a_server_of_another_host_fetch_the_weights_and_says_why(
    client: VLLMChatClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = SimpleNamespace(of=lambda _: Place("another host"))
    monkeypatch.setattr(engine_server, "Place", elsewhere)
    publisher = BroadcastPolicyPublisher(client, **PATIENT)
    report = await publisher.publish(ModelWeights(tiny_model(5)), 7)
    assert (report.details["plane"], report.verified) == ("http", True)
    assert publisher.choice is not None
    assert "the trainer's weights are not on a GPU" in publisher.choice.why


async def test_versions_may_go_back_for_another_trainer(url: str, client: VLLMChatClient) -> None:
    await BroadcastPolicyPublisher(client, **PATIENT).publish(ModelWeights(tiny_model(5)), 9)
    async with VLLMChatClient(url, model="tiny", api_key=KEY) as resumed:
        again = BroadcastPolicyPublisher(resumed, **PATIENT)
        await again.publish(ModelWeights(tiny_model(6)), 2)
        assert await resumed.get_policy_version() == 2


async def test_a_request_under_way_has_the_tokens_of_both_policies(client: VLLMChatClient) -> None:
    asked = asyncio.create_task(client.complete_tokens(request(max_tokens=200, endless=True)))
    await asyncio.sleep(0.1)  # it need not have begun: then all of it is of the newer policy
    publisher = BroadcastPolicyPublisher(client, canary=False, timeout_s=900.0)
    await publisher.publish(ModelWeights(tiny_model(5)), 1)
    spans = trace_of(await asked).version_spans
    assert spans[-1].end == 200
    assert {span.version for span in spans} <= {0, 1}


async def test_without_the_key_only_its_health_can_be_asked(url: str) -> None:
    paths = ("/v1/models", "/weight_info", "/openapi.json")
    posts = ("/finish_weight_update", "/collective_rpc", "/pause")
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            statuses = [(await session.get(url + path, headers=headers)).status for path in paths]
            statuses += [(await session.post(url + p, headers=headers)).status for p in posts]
            assert set(statuses) == {401}
        assert (await session.get(url + "/health")).status == 200


async def test_what_it_cannot_do_is_refused_with_a_reason(client: VLLMChatClient) -> None:
    asked = replace(request(), extensions={"max_think_tokens": 3})
    with pytest.raises(RequestRejectedError, match="thinking_token_budget"):
        await client.complete_tokens(asked)
    replica = client.replicas[0]
    for update, why in (
        ({"plane": "ipc"}, "no weights over 'ipc'"),
        ({"plane": "shared_memory", "path": "/etc/passwd"}, "not a file of weights"),
    ):
        body = {"method": STAGE, "args": [update]}
        with pytest.raises(InferenceError, match=why):
            await client.control(replica, "POST", "/collective_rpc", body=body, timeout_s=60)
