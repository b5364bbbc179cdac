"""Agents written with the plain `openai` package: its retries, streams and tools."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ludic.agents.programs import ChatServer, Session
from ludic.inference import HFChatTemplate
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.scripted_client import ScriptedCall
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.saw.building import build_items
from ludic.types import EnvironmentStep, ForkReason, Rollout
from tests.agents.programs.asking import TOOL, Recorded, check_exact, scripted, user
from tests.agents.programs.test_session import counted
from tests.agents.scripted import tiny_template
from tests.envs.waiting import eventually

pytestmark = pytest.mark.adapters("openai")


@asynccontextmanager
async def stock(client: Recorded, **options: Any) -> AsyncIterator[tuple[Any, Session, ChatServer]]:
    """An `AsyncOpenAI` of a new session, the session, and its server."""
    from openai import AsyncOpenAI

    session = Session(client, "scripted", tiny_template(), **options)
    async with ChatServer() as server:
        server.open(session)
        async with AsyncOpenAI(base_url=server.url, api_key=session.key) as asked:
            yield asked, session, server


async def use_tools(asked: Any, question: str) -> str:
    """The usual loop: ask, run the tools that are called, ask again."""
    messages: list[Any] = [user(question)]
    while True:
        completion = await asked.chat.completions.create(
            model="gpt-5", messages=messages, tools=[TOOL], tool_choice="auto"
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            assert completion.choices[0].finish_reason == "stop"
            return str(message.content)
        assert completion.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            found = json.loads(call.function.arguments)["a"] + 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(found)})


def adding(call: ScriptedCall) -> str:
    """Calls the tool twice with what the last message says, and then says it."""
    last = call.text.rpartition("<|im_start|>assistant")[0].rstrip().removesuffix("<|im_end|>")
    number = last.rpartition("\n")[2]
    if call.index == 2:
        return number
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>'


async def test_many_agents_with_tools_at_once_and_every_token_is_what_was_sampled() -> None:
    from openai import AsyncOpenAI

    client = scripted(adding)
    async with ChatServer() as server:

        async def one(number: int) -> None:
            session = server.open(
                Session(client, "m", tiny_template(), conversation_id=str(number))
            )
            async with AsyncOpenAI(base_url=server.url, api_key=session.key) as asked:
                assert await use_tools(asked, f"{number}") == str(number + 2)
            steps = session.take_steps()
            assert len(steps) == 3
            check_exact(steps, client)
            assert all(step.fork is None for step in steps)

        await asyncio.gather(*(one(10 * n) for n in range(8)))
    assert len(client.responses) == 24


async def test_a_stream_is_read_by_the_package_as_the_answer_is() -> None:
    said = 'Hm.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    client = scripted([said, "2"])
    async with stock(client) as (asked, session, _):
        messages: list[Any] = [user("1")]
        async with asked.chat.completions.stream(
            model="m", messages=messages, tools=[TOOL], stream_options={"include_usage": True}
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == "Hm."
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}
        (response,) = client.responses
        assert response.trace is not None
        assert final.usage.completion_tokens == len(response.trace.completion_token_ids)
        called = message.tool_calls[0].id
        messages += [message, {"role": "tool", "tool_call_id": called, "content": "2"}]
        parts = [
            chunk.choices[0].delta.content or ""
            async for chunk in await asked.chat.completions.create(
                model="m", messages=messages, tools=[TOOL], stream=True
            )
            if chunk.choices
        ]
        assert "".join(parts) == "2"
        steps = session.take_steps()
    check_exact(steps, client)
    assert [step.fork for step in steps] == [None, None]


class Cutting:
    """A way to the server that cuts connections: those of `cuts`, by their number, before an answer
    comes back."""

    def __init__(self, url: str, cuts: set[int]) -> None:
        self.port, self.cuts = int(url.split(":")[2].split("/")[0]), cuts
        self.connections = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self.port)

        async def carry() -> None:
            while data := await reader.read(65536):
                back.write(data)
                await back.drain()

        carrying = asyncio.create_task(carry())
        while data := await there.read(65536):
            if number in self.cuts:
                break
            writer.write(data)
            await writer.drain()
        carrying.cancel()
        writer.close()
        back.close()


async def test_a_cut_answer_is_asked_for_again_by_the_package_and_is_the_same() -> None:
    from openai import AsyncOpenAI

    client = scripted(counted)
    async with stock(client) as (_, session, server), Cutting(server.url, {0}) as url:
        async with AsyncOpenAI(base_url=url, api_key=session.key) as asked:
            messages: list[Any] = [user("hello")]
            first = await asked.chat.completions.create(model="m", messages=messages)
            messages += [first.choices[0].message, user("go on")]
            second = await asked.chat.completions.create(model="m", messages=messages)
        steps = session.take_steps()
    assert first.choices[0].message.content == "answer 0"
    assert second.choices[0].message.content == "answer 1"
    assert len(client.responses) == len(steps) == 2
    check_exact(steps, client)


async def test_a_time_out_of_the_package_waits_for_the_same_sample() -> None:
    client = scripted(counted)
    client.gate.clear()
    async with stock(client) as (asked, session, server):
        hasty = asked.with_options(timeout=1.0, max_retries=50)
        task = asyncio.create_task(
            hasty.chat.completions.create(model="m", messages=[user("hello")])
        )
        came: set[int] = set()

        def came_again() -> bool:
            running = server._runner.server
            came.update(map(id, running.connections if running else ()))
            return len(came) > 1

        await eventually(came_again, 60)
        client.gate.set()
        answer = await task
        steps = session.take_steps()
    assert answer.choices[0].message.content == "answer 0"
    assert len(client.responses) == len(steps) == 1


async def test_a_backend_that_fails_once_is_asked_again_and_nothing_is_recorded_twice() -> None:
    fault = {"fault": lambda call: RuntimeError("hiccup") if call.index == 0 else None}
    client = scripted(counted, **fault)
    async with stock(client) as (asked, session, _):
        answer = await asked.chat.completions.create(model="m", messages=[user("hello")])
        steps = session.take_steps()
    assert answer.choices[0].message.content == "answer 1"
    assert len(steps) == 1


async def test_the_same_question_again_is_another_sample() -> None:
    client = scripted(counted)
    async with stock(client) as (asked, session, _):
        ask = asked.chat.completions.create
        answers = await asyncio.gather(*(ask(model="m", messages=[user("hi")]) for _ in range(4)))
        steps = session.take_steps()
    assert sorted(a.choices[0].message.content for a in answers) == [
        f"answer {n}" for n in range(4)
    ]
    assert len(steps) == 4


async def test_an_agent_that_edits_its_history_forks_and_loses_no_sample() -> None:
    """It forgets all but the last exchange, as agents with a small memory do."""
    client = scripted(counted)
    async with stock(client) as (asked, session, _):
        messages: list[Any] = [user("hello")]
        for _ in range(4):
            completion = await asked.chat.completions.create(model="m", messages=messages[-3:])
            messages += [completion.choices[0].message, user("go on")]
        steps = session.take_steps()
    check_exact(steps, client)
    forks = [step.fork.reason if step.fork else None for step in steps]
    assert forks == [None, None, ForkReason.HISTORY_REWRITTEN, ForkReason.HISTORY_REWRITTEN]
    rollout = Rollout("r", (*steps, EnvironmentStep(0, tuple(range(4)), "", "a", "", 1.0, True)))
    items = build_items([rollout], {("r", 0): 1.0})
    assert len(items) == 3
    assert sum(int(item.action_mask.sum()) for item in items) == rollout.num_tokens


async def test_refusals_are_the_packages_own_errors() -> None:
    import openai

    async with stock(scripted(counted)) as (asked, session, server):
        create = asked.chat.completions.create
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model="m", messages=[user("hi")], n=2)
        assert (refused.value.param, refused.value.code) == ("n", "unsupported_value")
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            await create(model="m", messages=[user("hi")], logit_bias={"1": 5})
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            await asked.responses.create(model="m", input="hi")
        async with openai.AsyncOpenAI(base_url=server.url, api_key="sk-guess") as other:
            with pytest.raises(openai.AuthenticationError):
                await other.chat.completions.create(model="m", messages=[user("hi")])
        assert [model.id async for model in asked.models.list()] == ["scripted"]
        assert session.take_steps() == ()


async def test_what_the_engine_sampled_is_what_is_trained_on_through_the_package() -> None:
    from openai import AsyncOpenAI

    tokenizer = tiny_tokenizer()
    inference = InferenceSpec(SamplingConfig(max_tokens=6))
    model = tiny_model(max_position_embeddings=512)
    async with LocalChatClient(model, tokenizer, max_slots=4, max_context_tokens=512) as engine:
        client = Recorded(engine)
        template = HFChatTemplate(tokenizer)

        async def one(number: int) -> list[Any]:
            session = Session(client, "m", template, inference=inference, seed=number)
            async with ChatServer() as server:
                server.open(session)
                async with AsyncOpenAI(base_url=server.url, api_key=session.key) as asked:
                    messages: list[Any] = [user("hello")]
                    for _ in range(3):
                        done = await asked.chat.completions.create(model="m", messages=messages)
                        messages += [done.choices[0].message, user("go on")]
                return list(session.take_steps())

        sessions = await asyncio.gather(*(one(n) for n in range(4)))
    sampled = {response.trace for response in client.responses}
    assert {step.trace for steps in sessions for step in steps} == sampled
    assert len(sampled) == 12
    for steps in sessions:
        for before, after in itertools.pairwise(steps):
            assert after.fork is not None or after.trace.extends(before.trace)
