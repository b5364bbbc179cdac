from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from ludic.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    InferenceError,
    NotTrainableError,
    RequestRejectedError,
)
from ludic.inference import (
    ChatClient,
    HFChatTemplate,
    OpenAIChatClient,
    ReturnSpec,
    SamplingConfig,
    TokenCompletionRequest,
)
from ludic.inference.retries import Backoff
from ludic.inference.tiny import tiny_tokenizer
from ludic.types import FinishReason, Message
from tests.virtual_time import virtual_time

QUICK = Backoff(first_s=0.001, longest_s=0.002)
PROMPT = tuple(b"hello")
MESSAGES: list[Message] = [{"role": "user", "content": "hello"}]

Handler = Callable[["Server", dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """A real server on loopback; `answer` decides what each request gets."""

    answer: Handler
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0
    transport: asyncio.Transport | None = None

    def drop(self) -> None:
        """Cuts the connection of the request that is being answered."""
        assert self.transport is not None
        self.transport.abort()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.transport = request.transport
        self.bodies.append({"path": request.path, **body})
        self.headers.append(dict(request.headers))
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            return await self.answer(self, body)
        finally:
            self.open_now -= 1


@asynccontextmanager
async def serving(answer: Handler) -> AsyncIterator[Server]:
    server = Server(answer)
    app = web.Application()
    app.router.add_post("/v1/{rest:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


def completion(**choice: Any) -> web.Response:
    return web.json_response(
        {
            "id": "c1",
            "choices": [{"text": "hi", "finish_reason": "stop", **choice}],
            "usage": {"n": 1},
        }
    )


async def plain(server: Server, body: dict[str, Any]) -> web.StreamResponse:
    return completion()


def request(**sampling: Any) -> TokenCompletionRequest:
    return TokenCompletionRequest("m", PROMPT, SamplingConfig(**{"max_tokens": 8, **sampling}))


async def test_token_ids_are_sent_and_text_without_tokens_is_not_trainable() -> None:
    async with serving(plain) as server, OpenAIChatClient(server.url, api_key="k3y") as client:
        assert isinstance(client, ChatClient)
        response = await client.complete_tokens(request(stop=("x",), seed=5))
        assert response.text == "hi"
        assert response.finish_reason == FinishReason.STOP
        assert response.trace is None
        assert response.info["usage"] == {"n": 1}
        with pytest.raises(NotTrainableError, match="cannot be set"):
            await client.sync_weights({}, version=1)
        assert server.bodies == [
            {
                "path": "/v1/completions",
                "model": "m",
                "prompt": list(PROMPT),
                "temperature": 1.0,
                "top_p": 1.0,
                "max_tokens": 8,
                "stop": ["x"],
                "seed": 5,
            }
        ]
        assert server.headers[0]["Authorization"] == "Bearer k3y"
        assert "k3y" not in repr(client)


async def test_text_is_sent_to_a_server_that_takes_no_ids() -> None:
    template = HFChatTemplate(tiny_tokenizer())
    async with (
        serving(plain) as server,
        OpenAIChatClient(server.url, prompts="text", chat_template=template) as client,
    ):
        ids = tuple(template.render(MESSAGES))
        await client.complete_tokens(TokenCompletionRequest("m", ids, SamplingConfig(max_tokens=1)))
        assert server.bodies[0]["prompt"] == template.codec.decode(ids)
    with pytest.raises(ConfigError, match="chat_template"):
        OpenAIChatClient("http://127.0.0.1:1/v1", prompts="text")


async def with_tokens(server: Server, body: dict[str, Any]) -> web.StreamResponse:
    assert body["return_token_ids"] is True
    return completion(token_ids=[7, 8], logprobs={"token_logprobs": [-0.5, -1]})


async def test_ids_with_logprobs_of_the_sampled_distribution_are_trainable() -> None:
    async with (
        serving(with_tokens) as server,
        OpenAIChatClient(server.url, dialect="vllm") as client,
    ):
        response = await client.complete_tokens(request(stop=("x",)))
        trace = response.trace
        assert trace is not None
        assert trace.prompt_token_ids == PROMPT
        assert trace.completion_token_ids == (7, 8)
        assert trace.completion_logprobs == (-0.5, -1.0)
        assert server.bodies[0]["include_stop_str_in_output"] is True
        # Raw log-probs are not those of this distribution, and the server may have sent such.
        for changed in ({"temperature": 0.5}, {"top_k": 3}, {"repetition_penalty": 1.2}):
            assert (await client.complete_tokens(request(**changed))).trace is None
    async with (
        serving(with_tokens) as server,
        OpenAIChatClient(server.url, dialect="vllm", reports_sampled_logprobs=True) as client,
    ):
        assert (await client.complete_tokens(request(temperature=0.5))).trace is not None


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [7, 8]},
        {"logprobs": {"token_logprobs": [-0.5]}},
        {"token_ids": [7], "logprobs": {"token_logprobs": [None]}},
        {"token_ids": [7], "logprobs": None},
        {"token_ids": ["a"], "logprobs": {"token_logprobs": [-1.0]}},
    ],
)
async def test_tokens_without_logprobs_or_the_other_way_make_no_trace(choice: Any) -> None:
    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        return completion(**choice)

    async with serving(answer) as server, OpenAIChatClient(server.url) as client:
        assert (await client.complete_tokens(request())).trace is None


async def test_messages_are_sent_and_tool_calls_come_back_checked() -> None:
    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        calls = [
            {"id": "a", "function": {"name": "look", "arguments": '{"n": 1}'}},
            {"id": "b", "function": {"name": "look", "arguments": "[1]"}},
            {"id": "c", "function": {"name": "look", "arguments": "{"}},
            {"function": {}},
        ]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        return web.json_response({"choices": [{"message": message, "finish_reason": "tool_calls"}]})

    called: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"é": 1}}}
        ],
    }
    async with serving(answer) as server, OpenAIChatClient(server.url) as client:
        response = await client.complete_messages(
            [*MESSAGES, called], model="judge", tools=[{"type": "function"}]
        )
        assert response.trace is None
        assert response.text == ""
        assert [c["function"] for c in response.info["tool_calls"]] == [
            {"name": "look", "arguments": {"n": 1}}
        ]
        assert len(response.info["tool_call_errors"]) == 3
        sent = server.bodies[0]
        assert sent["path"] == "/v1/chat/completions"
        assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"é": 1}'
        assert "max_tokens" not in sent
        with pytest.raises(RequestRejectedError, match="no messages"):
            await client.complete_messages([], model="judge")


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_what_may_be_retried_is_retried(status: int) -> None:
    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        if len(server.bodies) < 3:
            return web.Response(status=status, text="later", headers={"Retry-After": "0.01"})
        return completion()

    async with serving(answer) as server, OpenAIChatClient(server.url, backoff=QUICK) as client:
        assert (await client.complete_tokens(request())).text == "hi"
        assert len(server.bodies) == 3
        assert client.retries == 2


async def test_a_broken_connection_is_retried_and_then_reported() -> None:
    async def hang_up(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        server.drop()
        return completion()

    async with serving(hang_up) as server:
        client = OpenAIChatClient(server.url, backoff=QUICK, max_retries=2)
        async with client:
            with pytest.raises(InferenceError, match="failed 3 times"):
                await client.complete_tokens(request())
        assert len(server.bodies) == 3
    # Nobody listens there any more.
    async with OpenAIChatClient(server.url, backoff=QUICK, max_retries=1) as client:
        with pytest.raises(InferenceError, match="Is the server up"):
            await client.complete_tokens(request())


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_request_that_is_wrong_is_not_retried(status: int) -> None:
    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text="no such model: m")

    async with serving(answer) as server, OpenAIChatClient(server.url, backoff=QUICK) as client:
        with pytest.raises(RequestRejectedError, match="no such model"):
            await client.complete_tokens(request())
        assert len(server.bodies) == 1


async def test_a_wrong_key_is_said_without_the_key() -> None:
    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=401, text="who are you")

    async with serving(answer) as server, OpenAIChatClient(server.url, api_key="k3y") as client:
        with pytest.raises(RequestRejectedError, match="api_key") as caught:
            await client.complete_tokens(request())
        assert "k3y" not in str(caught.value)


async def test_the_deadline_covers_slow_answers_retries_and_waiting_for_a_slot() -> None:
    async def slow(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(30)
        return completion()

    async with (
        serving(slow) as server,
        OpenAIChatClient(server.url, max_concurrency=1, timeout_s=0.1) as client,
    ):
        calls = [client.complete_tokens(request()) for _ in range(3)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(o, DeadlineError) for o in outcomes)

    async def busy(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=503, text="loading", headers={"Retry-After": "60"})

    async with serving(busy) as server, OpenAIChatClient(server.url) as client:
        asked = TokenCompletionRequest("m", PROMPT, SamplingConfig(max_tokens=1), timeout_s=0.2)
        with virtual_time(), pytest.raises(DeadlineError, match="HTTP 503: loading"):
            await client.complete_tokens(asked)


async def test_no_more_requests_are_open_than_allowed() -> None:
    full = asyncio.Event()

    async def steady(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        if server.open_now == 3:
            full.set()
        await full.wait()
        return completion()

    async with serving(steady) as server, OpenAIChatClient(server.url, max_concurrency=3) as client:
        responses = await asyncio.gather(*(client.complete_tokens(request()) for _ in range(20)))
        assert [r.text for r in responses] == ["hi"] * 20
        assert server.most_open == 3


async def test_a_cancelled_request_frees_its_slot() -> None:
    arrived = asyncio.Event()

    async def slow_once(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        if not arrived.is_set():
            arrived.set()
            await asyncio.sleep(30)
        return completion()

    async with (
        serving(slow_once) as server,
        OpenAIChatClient(server.url, max_concurrency=1) as client,
    ):
        task = asyncio.create_task(client.complete_tokens(request()))
        await asyncio.wait_for(arrived.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.complete_tokens(request())).text == "hi"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "did not answer with JSON"),
        ("{}", "no choices"),
        ("[]", "no choices"),
        ('{"choices": [{"finish_reason": "stop"}]}', "no text"),
        ('{"choices": [{"text": "a", "finish_reason": "boredom"}]}', "boredom"),
        (
            '{"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [1], '
            '"logprobs": {"token_logprobs": [-1, -2]}}]}',
            "1 token ids and 2 log-probs",
        ),
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error(text: str, said: str) -> None:
    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=text)

    async with serving(answer) as server, OpenAIChatClient(server.url) as client:
        with pytest.raises(InferenceError, match=said):
            await client.complete_tokens(request())


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("length", FinishReason.LENGTH),
        ("content_filter", FinishReason.ABORT),
        ("abort", FinishReason.ABORT),
    ],
)
async def test_the_reason_for_the_end_is_kept(reason: str, expected: FinishReason) -> None:
    async def answer(server: Server, body: dict[str, Any]) -> web.StreamResponse:
        return completion(finish_reason=reason)

    async with serving(answer) as server, OpenAIChatClient(server.url) as client:
        assert (await client.complete_tokens(request())).finish_reason == expected


async def test_settings_that_the_interface_has_no_word_for_are_refused() -> None:
    async with OpenAIChatClient("http://127.0.0.1:1/v1") as client:
        for setting in ({"top_k": 5}, {"min_p": 0.1}, {"stop_token_ids": (3,)}):
            with pytest.raises(RequestRejectedError, match=next(iter(setting))):
                await client.complete_tokens(request(**setting))
        with pytest.raises(RequestRejectedError, match="kept ids"):
            await client.complete_tokens(
                TokenCompletionRequest("m", PROMPT, returns=ReturnSpec(kept_ids=True))
            )
        with pytest.raises(RequestRejectedError, match="prompt is empty"):
            await client.complete_tokens(TokenCompletionRequest("m", ()))


async def test_the_length_is_never_left_to_the_servers_default() -> None:
    async with serving(plain) as server:
        async with OpenAIChatClient(server.url) as client:
            with pytest.raises(RequestRejectedError, match="max_tokens is not set"):
                await client.complete_tokens(TokenCompletionRequest("m", PROMPT))
        async with OpenAIChatClient(server.url, max_context_tokens=20) as client:
            await client.complete_tokens(TokenCompletionRequest("m", PROMPT))
            assert server.bodies[-1]["max_tokens"] == 20 - len(PROMPT)
        async with OpenAIChatClient(server.url, max_context_tokens=5) as client:
            with pytest.raises(RequestRejectedError, match="leaves no room"):
                await client.complete_tokens(TokenCompletionRequest("m", PROMPT))


async def test_a_closed_client_refuses() -> None:
    client = OpenAIChatClient("http://127.0.0.1:1/v1")
    await client.close()
    with pytest.raises(EngineClosedError):
        await client.complete_tokens(request())


def test_a_client_works_in_one_event_loop_after_another() -> None:
    client_of: dict[str, OpenAIChatClient] = {}

    async def once() -> str | None:
        async with serving(plain) as server:
            client = client_of.setdefault("it", OpenAIChatClient(server.url))
            client.base_url = server.url
            return (await client.complete_tokens(request())).text

    assert asyncio.run(once()) == "hi"
    assert asyncio.run(once()) == "hi"
    asyncio.run(client_of["it"].close())


@pytest.mark.parametrize(
    "setting",
    [
        {"base_url": "127.0.0.1:8000"},
        {"max_concurrency": 0},
        {"timeout_s": 0},
        {"max_retries": -1},
        {"dialect": "klingon"},
        {"prompts": "pictures"},
    ],
)
def test_a_setting_that_cannot_work_is_named(setting: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        OpenAIChatClient(**{"base_url": "http://127.0.0.1:1/v1", **setting})


def test_pauses_grow_up_to_a_limit_and_heed_the_server() -> None:
    backoff = Backoff(first_s=1, longest_s=5, jitter=0)
    assert [backoff.pause_s(n) for n in range(4)] == [1, 2, 4, 5]
    assert backoff.pause_s(0, 9.0) == 9.0
    jittered = Backoff(first_s=1, longest_s=5, jitter=0.5)
    assert all(0.5 <= jittered.pause_s(0) <= 1 for _ in range(100))
    with pytest.raises(ConfigError):
        Backoff(first_s=2, longest_s=1)
