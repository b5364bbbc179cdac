"""One client of an OpenAI-compatible server, asked from several event loops, or closed while busy;
and what a vLLM server is told, so that its log-probs are those of the policy."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from ludic.errors import EngineClosedError
from ludic.inference import OpenAIChatClient, SamplingConfig, TokenCompletionRequest
from ludic.inference.openai_client import sampling_body
from tests.inference.test_openai_client import QUICK, Server, completion, plain, serving

SLOW, FAST = 1, 2


def request(token: int) -> TokenCompletionRequest:
    return TokenCompletionRequest("m", (token,), SamplingConfig(max_tokens=1))


def ask_in_a_loop_of_its_own(client: OpenAIChatClient, token: int) -> str | None:
    """As a judge does who is called from a blocking environment in a worker thread."""
    return asyncio.run(client.complete_tokens(request(token))).text


async def open_requests(server: Server, count: int) -> None:
    end = time.monotonic() + 60
    while server.open_now < count:
        assert time.monotonic() < end, "the requests never came"
        await asyncio.sleep(0.005)


async def test_a_second_live_event_loop_leaves_the_first_ones_request_alone() -> None:
    released = asyncio.Event()

    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        if body["prompt"] == [SLOW]:
            await released.wait()
        return completion()

    async with (
        serving(answer) as server,
        OpenAIChatClient(server.url, max_retries=0) as client,
    ):
        slow = asyncio.create_task(asyncio.to_thread(ask_in_a_loop_of_its_own, client, SLOW))
        await open_requests(server, 1)
        assert await asyncio.to_thread(ask_in_a_loop_of_its_own, client, FAST) == "hi"
        assert (await client.complete_tokens(request(FAST))).text == "hi"
        released.set()
        assert await slow == "hi"


async def test_connections_of_closed_loops_are_given_up() -> None:
    async with serving(plain) as server, OpenAIChatClient(server.url) as client:
        for _ in range(5):
            assert await asyncio.to_thread(ask_in_a_loop_of_its_own, client, FAST) == "hi"
        await client.complete_tokens(request(FAST))
        assert list(client._connections.by_loop) == [asyncio.get_running_loop()]


@pytest.mark.parametrize("max_retries", [0, 3])
async def test_closing_while_busy_ends_the_requests_of_every_loop_with_the_reason(
    max_retries: int,
) -> None:
    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(60)
        return completion()

    async with serving(answer) as server:
        client = OpenAIChatClient(
            server.url, max_retries=max_retries, max_concurrency=2, backoff=QUICK
        )
        # Two are open here, one waits for its turn, and one is open in another thread.
        tasks = [asyncio.create_task(client.complete_tokens(request(SLOW))) for _ in range(3)]
        other = asyncio.create_task(asyncio.to_thread(ask_in_a_loop_of_its_own, client, SLOW))
        await open_requests(server, 3)
        await client.close()
        for found in await asyncio.gather(*tasks, other, return_exceptions=True):
            assert isinstance(found, EngineClosedError), repr(found)
            assert server.url in str(found)


async def test_a_vllm_server_is_told_what_is_off_so_that_it_takes_nothing_from_the_model() -> None:
    """A server fills in what a request leaves out from the model's generation_config.json."""
    from_the_model = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "top_p": 0.8}
    used: dict[str, Any] = {}

    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        used.update({**from_the_model, **body})
        return completion(token_ids=[7], logprobs={"token_logprobs": [-0.5]})

    async with (
        serving(answer) as server,
        OpenAIChatClient(server.url, dialect="vllm") as client,
    ):
        response = await client.complete_tokens(request(FAST))
        assert response.trace is not None
        assert response.trace.completion_logprobs == (-0.5,)
    assert {name: used[name] for name in from_the_model} == {
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "top_p": 1.0,
    }


def test_settings_that_are_on_are_sent_in_vllms_words_and_none_of_them_in_openais() -> None:
    body = sampling_body(SamplingConfig(top_k=3, min_p=0.2, stop_token_ids=(5,)), "vllm")
    assert body == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.2,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [5],
    }
    assert sampling_body(SamplingConfig(), "openai") == {"temperature": 1.0, "top_p": 1.0}
