"""Texts that take long to tokenise, and texts that could not be stored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from ludic.agents import ToolAgent
from ludic.agents.model_calls import LONG_TEXT
from ludic.agents.tools import ToolResult, as_text
from ludic.inference import HermesToolParser, HFChatTemplate, ScriptedChatClient
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import Runtime
from ludic.parsers import ParseResult
from ludic.plumbing.text import REPLACEMENT
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.types import (
    Action,
    ChatResponse,
    FinishReason,
    Info,
    Message,
    Obs,
    Rollout,
    StepOutcome,
    TruncationReason,
    to_json,
)
from tests.agents.scripted import move, scripted_agent, tool_call
from tests.interaction.worlds import Countdown
from tests.rollouts.worlds import GuessEnv

PLAIN = ProtocolSpec("single_agent", {"parser": "text"})


class Gate:
    """Closed until an episode has ended elsewhere."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.passed: list[bool] = []


class GatedTemplate(HFChatTemplate):
    """Takes until the gate opens to render what is long: as a tokenizer does, only longer."""

    gate: Gate

    def render(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        if sum(len(message["content"]) for message in messages) >= LONG_TEXT:
            self.gate.passed.append(self.gate.event.wait(30))
        return super().render(messages, tools)


class LongEnv(GuessEnv):
    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        super().env_reset(seed=seed)
        return "a " * (LONG_TEXT // 2), {}


async def test_other_episodes_go_on_while_a_long_text_is_tokenised() -> None:
    gate = Gate()

    class OpeningEnv(GuessEnv):
        def env_step(self, action: Action) -> StepOutcome:
            gate.event.set()
            return StepOutcome("", 1.0, terminated=True)

    template = GatedTemplate(tiny_tokenizer())
    template.gate = gate
    client = ScriptedChatClient(lambda call: "1", template, max_context_tokens=512)
    engine = RolloutEngine(
        {"long": LongEnv, "opening": OpeningEnv}, runtime=Runtime(client, template, "scripted")
    )
    requests = [RolloutRequest(EnvSpec(kind), PLAIN) for kind in ("long", "opening")]
    long, opening = await engine.generate_rollouts(requests, 3, 2)
    assert gate.passed == [True]
    assert opening.total_reward == 1.0
    assert long.error is None
    assert long.truncation_reason is TruncationReason.CONTEXT_WINDOW


async def test_the_seeds_of_calls_do_not_depend_on_where_they_are_tokenised() -> None:
    seeds: list[int | None] = []

    def policy(call: Any) -> str:
        seeds.append(call.request.sampling.seed)
        return move("1")

    agent = scripted_agent(policy)
    long: tuple[Message, ...] = ({"role": "user", "content": "a " * LONG_TEXT},)
    short: tuple[Message, ...] = ({"role": "user", "content": "a"},)
    for order in ((short, long, short), (short, short, short)):
        agent.begin_calls(7, None)
        for messages in order:
            assert await agent.complete(messages) is not None
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3


async def played(agent: Any) -> Rollout:
    from ludic.interaction import RunSpec, SingleAgentSyncProtocol

    (rollout,) = await SingleAgentSyncProtocol(agent).run(Countdown(), RunSpec("e"))
    return rollout


async def test_what_tools_say_is_cleaned() -> None:
    def echo(text: str) -> Any:
        """Says it again, as half a pair."""
        return {"said": text, "own": "\udfff"} if text else "\ud800"

    template = HFChatTemplate(tiny_tokenizer(), HermesToolParser())
    script = [tool_call("echo", text="a"), tool_call("echo", text=""), *[move("1")] * 9]
    agent = scripted_agent(script, ToolAgent, template=template, tools=[echo])
    rollout = await played(agent)
    first, second = rollout.agent_steps[:2]
    assert REPLACEMENT in first.tool_messages[0]["content"]
    assert second.tool_messages[0]["content"] == REPLACEMENT
    to_json(rollout)


class TextClient:
    """A backend without ids, whose JSON held half a pair."""

    max_context_tokens = None

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        text = move("1") + "\ud800"
        return ChatResponse(None, FinishReason.STOP, text, {"said \ud800": ["\udfff"]})


async def test_what_a_server_says_is_cleaned() -> None:
    agent = scripted_agent(["never said"])
    agent.client = TextClient()  # type: ignore[assignment]
    rollout = await played(agent)
    assert rollout.error is None
    assert rollout.agent_steps[0].message["content"] == move("1") + REPLACEMENT
    assert rollout.agent_steps[0].info == {f"said {REPLACEMENT}": [REPLACEMENT]}
    to_json(rollout)


async def test_what_a_parser_makes_of_a_text_is_cleaned() -> None:
    answers = iter([ParseResult(None, 0.0, "again \ud800"), *[ParseResult("1\udfff")] * 9])
    rollout = await played(scripted_agent(["hm"] * 9, parser=lambda text: next(answers)))
    assert rollout.env_steps[0].next_obs == f"again {REPLACEMENT}"
    assert rollout.env_steps[1].action == f"1{REPLACEMENT}"
    to_json(rollout)


def test_a_tools_answer_of_any_kind_can_be_stored() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd \ud800"

    for value in ("\ud800", ["\ud800"], {"\ud800": 1}, Odd()):
        assert REPLACEMENT in ToolResult(as_text(value)).content
    assert ToolResult.failed("\ud800").error == REPLACEMENT


async def test_an_external_tools_handler_that_exits_costs_the_turn_and_not_the_loop() -> None:
    def ask(task: str) -> str:
        """Asks somebody."""
        raise AssertionError

    async def handler(call: Any) -> str:
        raise SystemExit(3)

    template = HFChatTemplate(tiny_tokenizer(), HermesToolParser())
    agent = scripted_agent(
        [tool_call("ask", task="x")],
        ToolAgent,
        template=template,
        external_tools=[ask],
        external_tool_handler=handler,
    )
    async with asyncio.timeout(60):
        rollout = await played(agent)
    assert rollout.error is not None
    assert "SystemExit: 3" in rollout.error
