"""A server over a recorded client, and requests to it, for the tests of programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from ludic.agents.programs import ChatServer, Session
from ludic.inference.client import ChatClient, TokenCompletionRequest
from ludic.inference.scripted_client import ScriptedChatClient
from ludic.inference.templates.chat_template import ChatTemplate
from ludic.types import AgentStep, ChatResponse, Message
from tests.agents.scripted import Script, tiny_template
from tests.envs.waiting import eventually

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class Recorded:
    """A client that keeps what it sampled, and can be held up at a gate."""

    def __init__(self, client: ChatClient) -> None:
        self.client = client
        self.requests: list[TokenCompletionRequest] = []
        self.responses: list[ChatResponse] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()

    @property
    def max_context_tokens(self) -> int | None:
        return self.client.max_context_tokens

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        self.requests.append(request)
        self.begun.set()
        await self.gate.wait()
        response = await self.client.complete_tokens(request)
        self.responses.append(response)
        return response

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        return await self.client.sync_weights(params, timeout_s=timeout_s, version=version)


def scripted(script: Script, **options: Any) -> Recorded:
    """A recorded client that says the script."""
    return Recorded(ScriptedChatClient(script, tiny_template(), **options))


class Caller:
    """Asks a server, as a program would."""

    def __init__(self, http: aiohttp.ClientSession, server: ChatServer, session: Session) -> None:
        self.http, self.server, self.session = http, server, server.open(session)
        self.url, self.key = server.url, session.key

    async def cut(self, *tasks: asyncio.Task[Any]) -> None:
        """Breaks off requests, and returns when the server knows that they are gone."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.connections_closed()

    async def connections_closed(self) -> None:
        running = self.server._runner.server
        assert running is not None
        await eventually(lambda: all(c.transport is None for c in running.connections))

    async def post(
        self, body: Any, headers: Mapping[str, str] | None = None, path: str = "chat/completions"
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.key}", **(headers or {})}
        async with self.http.post(f"{self.url}/{path}", data=data, headers=sent) as response:
            return response.status, json.loads(await response.text())

    async def ask(
        self, messages: Sequence[Any], headers: Mapping[str, str] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """The assistant's message."""
        status, answer = await self.post(
            {"model": "any", "messages": messages, **arguments}, headers
        )
        assert status == 200, answer
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message


@asynccontextmanager
async def asking(
    client: ChatClient, template: ChatTemplate | None = None, **options: Any
) -> AsyncIterator[Caller]:
    """A server with one session, and somebody who asks it."""
    session = Session(client, "scripted", template or tiny_template(), **options)
    async with ChatServer() as server, aiohttp.ClientSession() as http:
        yield Caller(http, server, session)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def check_exact(steps: Sequence[AgentStep], client: Recorded) -> None:
    """Each step has the tokens that the client sampled for it, and extends the one before it unless
    it says that it forks."""
    sampled = [response.trace for response in client.responses]
    for step, before in zip(steps, [None, *steps], strict=False):
        assert step.trace in sampled
        assert step.trace is not None
        if before is None:
            assert step.fork is None
            continue
        assert before.trace is not None
        assert step.trace.extends(before.trace) == (step.fork is None)
    assert len({id(step.trace) for step in steps}) == len(steps)
