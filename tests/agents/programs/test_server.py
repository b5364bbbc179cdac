"""The server over HTTP: who may ask, what streams, and what becomes of cut connections."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

from ludic.agents.programs import ChatServer, Session
from ludic.errors import ConfigError
from tests.agents.programs.asking import TOOL, Caller, asking, scripted, user
from tests.agents.programs.test_session import FIRST, RETRY, counted
from tests.agents.scripted import tiny_template
from tests.envs.waiting import eventually

BODY = {"model": "any", "messages": [user("hello")]}


async def streamed(caller: Caller, **arguments: Any) -> list[Any]:
    """The events of a streamed answer, `[DONE]` as it is."""
    headers = {"Authorization": f"Bearer {caller.key}"}
    body = {**BODY, "stream": True, **arguments}
    url = f"{caller.url}/chat/completions"
    async with caller.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = await response.text()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


async def test_a_completion_has_the_apis_form() -> None:
    async with asking(scripted(["hi"])) as caller:
        status, answer = await caller.post(BODY)
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "scripted"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3


async def test_a_stream_says_the_same_in_parts() -> None:
    said = 'Hm.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    async with asking(scripted([said, said])) as caller:
        _, whole = await caller.post({**BODY, "tools": [TOOL]})
        events = await streamed(caller, tools=[TOOL], stream_options={"include_usage": True})
        steps = caller.session.take_steps()
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hm."
    (call,) = [one for delta in deltas for one in delta.get("tool_calls", [])]
    assert call["function"] == whole["choices"][0]["message"]["tool_calls"][0]["function"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == whole["usage"]
    assert [step.message["content"] for step in steps] == ["Hm.", "Hm."]


async def test_the_models_are_listed() -> None:
    async with asking(scripted(["hi"])) as caller:
        headers = {"Authorization": f"Bearer {caller.key}"}
        for path, one in (("models", False), ("models/whatever", True)):
            async with caller.http.get(f"{caller.url}/{path}", headers=headers) as response:
                found = await response.json()
            entry = found if one else found["data"][0]
            assert (entry["id"], entry["object"]) == ("scripted", "model")


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {key}", "{key}"]
)
async def test_nobody_asks_without_the_key(authorization: str | None) -> None:
    client = scripted(["hi"])
    async with asking(client) as caller:
        headers = {}
        if authorization is not None:
            headers["Authorization"] = authorization.format(key=caller.key)
        for method, path in (("POST", "chat/completions"), ("GET", "models"), ("GET", "x")):
            asked = caller.http.request(method, f"{caller.url}/{path}", headers=headers, json=BODY)
            async with asked as response:
                said = await response.json()
            assert (response.status, said["error"]["code"]) == (401, "invalid_api_key")
            assert caller.key not in json.dumps(said)
    assert not client.requests


async def test_sessions_see_only_themselves_and_a_closed_one_is_nobodys() -> None:
    client = scripted(counted)
    async with ChatServer() as server, aiohttp.ClientSession() as http:
        sessions = [
            Session(client, f"model-{n}", tiny_template(), conversation_id=str(n)) for n in range(2)
        ]
        ann, bob = (Caller(http, server, session) for session in sessions)
        assert len(ann.key) >= 40
        assert ann.key != bob.key
        first = await ann.ask([user("hello")], FIRST)
        # The other's retry of the very same bytes is a sample of its own.
        second = await bob.ask([user("hello")], RETRY)
        assert len(client.responses) == 2
        assert first == second  # each the first answer of its conversation
        await bob.ask([user("hello"), second, user("go on")])
        assert [len(session.take_steps()) for session in sessions] == [1, 2]
        await server.close(sessions[0])
        assert (await ann.post(BODY))[0] == 401
        assert (await bob.post(BODY))[0] == 200


async def test_many_sessions_at_once_keep_their_tokens_apart() -> None:
    client = scripted(lambda call: call.tail(60).partition("user\n")[2][:6])
    async with ChatServer() as server, aiohttp.ClientSession() as http:

        async def talk(name: str) -> None:
            session = Session(client, "m", tiny_template(), conversation_id=name)
            caller = Caller(http, server, session)
            messages: list[Any] = [user(name)]
            for _ in range(3):
                messages += [await caller.ask(messages), user(name)]
            steps = session.take_steps()
            assert [step.message["content"] for step in steps] == [name] * 3
            assert all(step.fork is None for step in steps)

        await asyncio.gather(*(talk(f"name{n:02}") for n in range(20)))


async def test_addresses_and_methods_that_are_none_are_said() -> None:
    async with asking(scripted(["hi"])) as caller:
        for path in ("completions", "responses", "embeddings"):
            status, said = await caller.post(BODY, path=path)
            assert (status, said["error"]["code"]) == (404, "unknown_url")
        status, said = await caller.post(BODY, path="models")
        assert (status, said["error"]["code"]) == (405, "method_not_supported")


async def test_a_huge_body_is_refused() -> None:
    session = Session(scripted(["hi"]), "m", tiny_template())
    async with ChatServer(max_body_bytes=1000) as server, aiohttp.ClientSession() as http:
        caller = Caller(http, server, session)
        status, said = await caller.post({"model": "m", "messages": [user("x" * 2000)]})
        assert (status, said["error"]["code"]) == (413, "request_too_large")
        assert (await caller.post(BODY))[0] == 200


async def test_only_this_machine_is_listened_to() -> None:
    async with ChatServer() as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", server.url)
        assert [address[0] for address in server._runner.addresses] == ["127.0.0.1"]
    with pytest.raises(ConfigError, match="not open"):
        _ = server.url


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_cut_while_sampling_is_found_again_by_the_retry(stream: bool) -> None:
    client = scripted(counted)
    client.gate.clear()
    async with asking(client) as caller:
        body = json.dumps({**BODY, "stream": stream}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {caller.key}\r\nx-stainless-retry-count: 0\r\n\r\n"
        )
        port = int(caller.url.split(":")[2].split("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        await client.begun.wait()
        writer.close()
        await writer.wait_closed()
        await caller.connections_closed()
        client.gate.set()
        await eventually(lambda: bool(client.responses) and not caller.session._asked[0].waiting)
        assert caller.session.undelivered == 1
        headers = {**RETRY, "Authorization": f"Bearer {caller.key}"}
        url = f"{caller.url}/chat/completions"
        async with caller.http.post(url, data=body, headers=headers) as response:
            assert "answer 0" in await response.text()
        assert caller.session.undelivered == 0
        assert len(client.responses) == len(caller.session.take_steps()) == 1
