"""`VLLMChatClient` with servers that fail in ways a real one will not on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from ludic.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    InferenceError,
    PublishError,
    RequestRejectedError,
)
from ludic.inference.client import ChatClient, VersionedClient
from ludic.inference.retries import Backoff
from ludic.inference.sampling import ReturnSpec
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import free_port
from ludic.inference.vllm.wire import VLLMExtensions
from ludic.types import VersionSpan
from tests.inference.vllm.asking import request, trace_of
from tests.inference.vllm.fake_server import FakeVLLM, failing, hanging, vanishing

QUICK = Backoff(first_s=0.001, longest_s=0.01)
GENERATE = "/inference/v1/generate"


@pytest.fixture
async def fake() -> AsyncIterator[FakeVLLM]:
    async with FakeVLLM().serving() as found:
        yield found


@pytest.fixture
async def client(fake: FakeVLLM) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient(fake.url, backoff=QUICK, max_retries=3) as found:
        yield found


async def test_a_shorter_context_than_the_servers_bounds_prompts_and_completions(
    fake: FakeVLLM,
) -> None:
    async with VLLMChatClient(fake.url, backoff=QUICK, max_context_tokens=40) as client:
        await client.connect()
        assert client.max_context_tokens == 40  # the server takes 128
        await client.complete_tokens(request([5] * 30, max_tokens=None))
        assert fake.bodies[-1]["sampling_params"]["max_tokens"] == 10
        with pytest.raises(RequestRejectedError, match="max_context_tokens=40"):
            await client.complete_tokens(request([5] * 40))
    async with VLLMChatClient(fake.url, backoff=QUICK, max_context_tokens=4000) as client:
        await client.connect()
        assert client.max_context_tokens == 128


async def test_it_is_a_versioned_chat_client(client: VLLMChatClient) -> None:
    assert isinstance(client, ChatClient)
    assert isinstance(client, VersionedClient)
    assert client.max_context_tokens == 128


async def test_every_sampling_setting_is_sent_so_that_no_default_sneaks_in(
    client: VLLMChatClient, fake: FakeVLLM
) -> None:
    await client.complete_tokens(request(max_tokens=4, temperature=0.5))
    params = fake.bodies[-1]["sampling_params"]
    off = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}
    assert off.items() <= params.items()
    assert params["temperature"] == 0.5
    assert params["logprobs"] == 0


async def test_extensions_reach_the_right_place(client: VLLMChatClient, fake: FakeVLLM) -> None:
    from msgspec.structs import replace

    overrides = {"min_tokens": 2, "priority": 3, "sampling_params": {"top_k": 5}}
    extensions = VLLMExtensions(extra_body_overrides=overrides, max_think_tokens=64)
    await client.complete_tokens(replace(request(), extensions=extensions))
    body = fake.bodies[-1]
    assert body["priority"] == 3
    assert body["sampling_params"]["min_tokens"] == 2
    assert body["sampling_params"]["top_k"] == 5
    assert body["sampling_params"]["thinking_token_budget"] == 64


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_what_may_pass_is_tried_again(
    client: VLLMChatClient, fake: FakeVLLM, status: int
) -> None:
    fake.faults[GENERATE] = failing(status, times=2)
    response = await client.complete_tokens(request())
    assert trace_of(response).completion_token_ids == (7, 8, 9)
    assert client.retries >= 2


async def test_what_cannot_pass_is_not_tried_again(client: VLLMChatClient, fake: FakeVLLM) -> None:
    asked = fake.calls[GENERATE]
    fake.faults[GENERATE] = failing(400)
    with pytest.raises(RequestRejectedError, match="made to fail with 400"):
        await client.complete_tokens(request())
    assert fake.calls[GENERATE] == asked + 1


async def test_an_empty_prompt_is_refused_without_a_server() -> None:
    client = VLLMChatClient(f"http://127.0.0.1:{free_port()}", model="tiny")
    with pytest.raises(RequestRejectedError, match="empty"):
        await client.complete_tokens(request([]))


async def test_a_server_that_keeps_failing_is_named_with_its_reason(
    client: VLLMChatClient, fake: FakeVLLM
) -> None:
    fake.faults[GENERATE] = failing(500)
    with pytest.raises(InferenceError, match=r"in 4 tries.*made to fail with 500"):
        await client.complete_tokens(request())


async def test_a_server_that_never_answers_meets_the_deadline(
    client: VLLMChatClient, fake: FakeVLLM
) -> None:
    fake.faults[GENERATE] = hanging
    with pytest.raises(DeadlineError, match="a completion"):
        await client.complete_tokens(request(timeout_s=0.1))
    assert client.replicas[0].in_flight == 0


def reply(**changes: Any) -> Any:
    choice = {
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
        **changes,
    }
    return lambda _: {"choices": [choice]}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (reply(token_ids=None), "no token ids"),
        (reply(token_ids=["a"]), "no token ids"),
        (reply(logprobs={"content": [{"logprob": -1.0}]}), "2 token ids and 1 log-probs"),
        (reply(logprobs=None), "2 token ids and 0 log-probs"),
        (reply(logprobs={"content": [{"logprob": -9999.0}, {"logprob": 0}]}), "token 0 is -9999"),
        (reply(finish_reason="tired"), "unknown reason 'tired'"),
        (reply(weight_versions=[{"version": "4", "start": 0, "end": 1}]), "do not cover 2 tokens"),
        (reply(weight_versions=[{"version": "x", "start": 0, "end": 2}]), "another trainer"),
        (lambda _: {"choices": []}, "no choices"),
        (lambda _: [1], "no choices"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error_of_its_own_request(
    client: VLLMChatClient, fake: FakeVLLM, answer: Any, says: str
) -> None:
    fake.faults[GENERATE] = answer
    with pytest.raises(InferenceError, match=says):
        await client.complete_tokens(request())
    del fake.faults[GENERATE]
    await client.complete_tokens(request())


async def test_kept_ids_are_read_where_the_server_records_them(
    client: VLLMChatClient, fake: FakeVLLM
) -> None:
    asked = request(top_k=2, returns=ReturnSpec(kept_ids=True))
    fake.faults[GENERATE] = reply(sampling_mask=[[1, 5], [2, 3]])
    assert trace_of(await client.complete_tokens(asked)).kept_token_ids == ((1, 5), (2, 3))
    fake.faults[GENERATE] = reply()
    with pytest.raises(RequestRejectedError, match="--return-sampling-mask"):
        await client.complete_tokens(asked)


async def test_version_spans_are_the_server_s(client: VLLMChatClient, fake: FakeVLLM) -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    fake.faults[GENERATE] = reply(weight_versions=spans)
    trace = trace_of(await client.complete_tokens(request()))
    assert trace.version_spans == (VersionSpan(0, 1, 0), VersionSpan(1, 2, 3))


async def test_a_server_without_the_new_route_is_asked_over_the_old_one() -> None:
    older = tuple(r for r in FakeVLLM().routes if r not in ("/weight_info", GENERATE))
    async with (
        FakeVLLM(routes=older).serving() as fake,
        VLLMChatClient(fake.url, version=3) as client,
    ):
        trace = trace_of(await client.complete_tokens(request()))
        assert trace.completion_logprobs == (-1.0, -2.0, -3.0)
        assert trace.version_spans == (VersionSpan(0, 3, 3),)
        assert fake.bodies[-1]["return_token_ids"] is True
        assert await client.get_policy_version() == 3


async def test_a_disabled_new_route_falls_back_too(fake: FakeVLLM) -> None:
    fake.faults[GENERATE] = failing(403)
    async with VLLMChatClient(fake.url) as client:
        await client.complete_tokens(request())
    assert fake.calls["/v1/completions"] == 1


async def test_something_that_is_no_vllm_is_told(fake: FakeVLLM) -> None:
    fake.faults["/v1/models"] = lambda _: {"hello": "world"}
    with pytest.raises(ConfigError, match="does not answer like a vLLM server"):
        await VLLMChatClient(fake.url).connect()
    fake.faults["/v1/models"] = failing(404)
    client = VLLMChatClient(fake.url)
    with pytest.raises(ConfigError, match="is the address right"):
        await client.connect()
    await client.close()


class NoKeeper:
    """A publisher that brings nothing back."""

    async def publish(self, weights: object, version: int) -> None:
        raise AssertionError

    async def restore(self, replica: object) -> bool:
        return False


async def test_a_server_that_comes_back_with_other_weights_stays_out_until_a_publish() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(FakeVLLM().serving())
        second = await stack.enter_async_context(FakeVLLM().serving())
        client = VLLMChatClient([first.url, second.url], backoff=QUICK)
        client.keeper = NoKeeper()
        await stack.enter_async_context(client)
        first.version = second.version = "5"
        client.version = 5
        for fake in (first, second):
            fake.faults[GENERATE] = failing(503, times=1)
        await client.complete_tokens(request())
        second.version = "default"  # restarted
        client.replicas[1].mark_down("gone", 0.0)
        async with asyncio.timeout(60):
            while client.replicas[1].out is None:
                await client.complete_tokens(request())
        assert client.replicas[0].out is None
        assert "came back with version 0 instead of version 5" in str(client.replicas[1].out)


async def test_who_publishes_nothing_takes_a_server_back_with_any_weights_of_a_trainer() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(FakeVLLM(version="5").serving())
        second = await stack.enter_async_context(FakeVLLM(version="5").serving())
        client = VLLMChatClient([first.url, second.url], backoff=QUICK)
        await stack.enter_async_context(client)
        away = client.replicas[1]

        async def is_used() -> bool:
            before = away.served
            await asyncio.gather(*(client.complete_tokens(request(seed=n)) for n in range(4)))
            return away.served > before

        async def comes_back(version: str) -> None:
            second.version = version
            away.mark_down("gone", 0.0)
            asked = second.calls["/weight_info"]
            async with asyncio.timeout(60):
                while second.calls["/weight_info"] == asked or client._learning:
                    await client.complete_tokens(request())

        assert await is_used()
        await comes_back("7")
        assert await is_used()
        await comes_back("4")  # of a trainer that was resumed
        assert await is_used()
        await comes_back("default")
        assert "the weights that it was started with" in str(away.lost)
        second.version = "8"
        async with asyncio.timeout(60):
            while not await is_used():
                pass


async def test_a_new_server_is_asked_for_its_weights_by_those_who_publish_nothing() -> None:
    async with (
        FakeVLLM(version="3").serving() as first,
        FakeVLLM().serving() as fresh,
        VLLMChatClient(first.url, backoff=QUICK, version=-1) as client,
    ):
        client.set_servers({first.url: "a", fresh.url: "b"})
        async with asyncio.timeout(60):
            while "started with" not in str(client.replicas[1].lost):
                await client.complete_tokens(request())
        assert client.replicas[1].served == 0
        fresh.version = "3"
        async with asyncio.timeout(60):
            while not client.replicas[1].served:
                await client.complete_tokens(request())


async def test_the_first_server_that_answers_is_enough_to_know_that_one_does() -> None:
    async with (
        FakeVLLM().serving() as first,
        FakeVLLM().serving() as second,
        VLLMChatClient([first.url, second.url]) as client,
    ):
        first.faults["/health"] = hanging
        assert await client.any_answers(timeout_s=3600.0)
        second.faults["/health"] = vanishing
        first.faults["/health"] = failing(404)
        assert await client.any_answers()
        first.faults["/health"] = vanishing
        assert not await client.any_answers()


async def test_nobody_waits_for_a_server_that_is_away_while_another_serves() -> None:
    async with (
        FakeVLLM().serving() as first,
        FakeVLLM().serving() as second,
        VLLMChatClient([first.url, second.url], backoff=QUICK) as client,
    ):
        client.replicas[0].mark_down("gone", 0.0)
        first.faults["/v1/models"] = hanging
        for seed in range(3):
            await client.complete_tokens(request(seed=seed))
        assert client.replicas[1].served == 3
        del first.faults["/v1/models"]


async def test_a_server_that_is_well_again_serves_again() -> None:
    async with (
        FakeVLLM().serving() as first,
        FakeVLLM().serving() as second,
        VLLMChatClient([first.url, second.url], backoff=QUICK) as client,
    ):
        client.replicas[0].mark_down("gone", 0.0)
        async with asyncio.timeout(60):
            while not client.replicas[0].served:
                await client.complete_tokens(request())
        assert client.in_rotation() == list(client.replicas)


async def test_a_request_that_an_update_aborted_is_asked_elsewhere() -> None:
    async with (
        FakeVLLM().serving() as first,
        FakeVLLM().serving() as second,
        VLLMChatClient([first.url, second.url], backoff=QUICK) as client,
    ):
        first.faults[GENERATE] = reply(finish_reason="abort")
        for seed in range(4):
            trace = trace_of(await client.complete_tokens(request(seed=seed)))
            assert trace.completion_token_ids == (7, 8, 9)


async def test_at_most_so_many_requests_are_open_at_once(fake: FakeVLLM) -> None:
    most, full = 0, asyncio.Event()

    async def slow(_: Any) -> Any:
        nonlocal most
        most = max(most, narrow.replicas[0].in_flight)
        if most == 3:
            full.set()
        await full.wait()

    async with VLLMChatClient(fake.url, max_concurrency=3) as narrow:
        fake.faults[GENERATE] = slow
        await asyncio.gather(*(narrow.complete_tokens(request(seed=n)) for n in range(12)))
    assert most == 3


async def test_a_closed_client_refuses(fake: FakeVLLM) -> None:
    client = VLLMChatClient(fake.url)
    await client.close()
    with pytest.raises(EngineClosedError):
        await client.complete_tokens(request())


async def test_a_client_that_finds_no_server_leaves_no_connection_open() -> None:
    async with FakeVLLM().serving() as gone:
        url = gone.url
    client = VLLMChatClient(url, backoff=QUICK)
    with pytest.raises(InferenceError, match="no vLLM server answers"):
        async with client:
            pass
    with pytest.raises(EngineClosedError):
        await client.complete_tokens(request())


async def test_weights_need_a_publisher(client: VLLMChatClient) -> None:
    with pytest.raises(PublishError, match="BroadcastPolicyPublisher"):
        await client.sync_weights({}, version=1)


@pytest.mark.parametrize(
    "wrong",
    [{"servers": []}, {"servers": ["localhost:80"]}, {"servers": ["http://a", "http://a/"]}],
)
def test_wrong_addresses_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="servers"):
        VLLMChatClient(**wrong)


def test_one_client_serves_several_event_loops_one_after_another() -> None:
    async def once(client: VLLMChatClient) -> None:
        async with FakeVLLM().serving() as fake:
            client.replicas[0].url = fake.url
            await client.complete_tokens(request())

    client = VLLMChatClient("http://127.0.0.1:9")
    for _ in range(2):
        asyncio.run(once(client))


async def test_a_client_that_finds_nobody_leaves_nothing_open() -> None:
    client = VLLMChatClient(f"http://127.0.0.1:{free_port()}", max_retries=0)
    with pytest.raises(InferenceError, match="no vLLM server answers"):
        await client.__aenter__()
    assert client._connections.by_loop == {}
    with pytest.raises(EngineClosedError):
        await client.connect()
