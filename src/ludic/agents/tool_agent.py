"""An agent whose turn may hold tool calls before its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ludic.agents.base_agent import ActResult, Agent
from ludic.agents.model_calls import ModelCall
from ludic.agents.tools import (
    OpenTools,
    StatefulTool,
    Tool,
    ToolFunction,
    ToolResult,
    ToolSource,
    as_text,
    call_tool,
    end_episode,
    tool_message,
    tools_by_name,
)
from ludic.errors import AgentError, ToolError
from ludic.inference.client import ToolRequest
from ludic.inference.templates.chat_template import ChoosesToolParser
from ludic.types import FinishReason, Message, ToolCall
from ludic.workers.deadlines import ended
from ludic.workers.threads import contained

ExternalToolHandler: TypeAlias = Callable[[ToolCall], Awaitable[str]]
"""Returns the text that answers a call of an external tool. A `ToolError` is shown to the model."""

MAX_TOOL_CHARS = 10_000
"""How much of a tool's answer a model is shown, unless its agent says otherwise."""

ROUNDS_FEEDBACK = "Your turn is over without an answer: no further tool calls were allowed in it."


@dataclass(eq=False, repr=False, kw_only=True)
class ToolAgent(Agent):
    """Runs the tools that the model calls, shows it their answers, and asks again.

    `tools` run inside the turn, one after another: plain functions in worker threads, coroutines
    on the event loop. Calls of `external_tools` are handed to `external_tool_handler`, which a
    protocol sets; those of one message run at the same time. `tool_sources` are opened with the
    first turn, and closed with the agent; their tools are among the others. A turn has at most
    `max_tool_rounds` rounds of calls, or, which is one more, `max_rounds` model calls. Tool calls
    are not actions: the parser reads only the message that ends the turn, and calls are free; but
    a turn that ends without an answer gets the penalty of no answer. The middle of an answer of
    more than `max_tool_chars` characters is left out, with a word that says how much.
    """

    default_rounds: ClassVar[int] = 5
    """How many model calls a turn may have where neither of the two bounds is given."""
    last_round_notice: ClassVar[str | None] = None
    """What is added to the answers of the last round of tools, if anything."""

    tools: Sequence[ToolFunction | Tool] = ()
    tool_sources: Sequence[ToolSource] = ()
    external_tools: Sequence[ToolFunction | Tool] = ()
    external_tool_handler: ExternalToolHandler | None = None
    max_rounds: int | None = None
    max_tool_rounds: int | None = None
    tool_timeout_s: float | None = 30.0
    external_tool_timeout_s: float | None = 600.0
    max_tool_chars: int | None = MAX_TOOL_CHARS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_rounds is not None and self.max_tool_rounds is not None:
            raise AgentError("max_rounds and max_tool_rounds bound the same: give one of them")
        if self.max_rounds is not None and self.max_rounds < 1:
            raise AgentError(f"max_rounds={self.max_rounds}: a turn needs at least one model call")
        if self.max_tool_rounds is not None and self.max_tool_rounds < 0:
            raise AgentError(f"max_tool_rounds={self.max_tool_rounds}: must be >= 0")
        if self.max_tool_chars is not None and self.max_tool_chars < 1:
            raise AgentError(f"max_tool_chars={self.max_tool_chars}: must be >= 1, or None")
        if self.max_tool_rounds is None:
            self.max_tool_rounds = (self.max_rounds or self.default_rounds) - 1
        self._own_tools = tuple(tools_by_name(self.tools).values())
        self._external = tools_by_name(self.external_tools)
        self._open: list[OpenTools] = []
        self._know(self._own_tools)
        if (self._shown or self.tool_sources) and isinstance(self.chat_template, ChoosesToolParser):
            self.chat_template = self.chat_template.for_tools()

    def reset(self, system_prompt: str | None = None, **options: Any) -> None:
        super().reset(system_prompt, **options)
        for tool in self.internal_tools.values():  # where the last episode was not closed
            if isinstance(tool.function, StatefulTool):
                tool.function.close()

    def _know(self, tools: Sequence[Tool]) -> None:
        """From now on the model is shown `tools`, and the external ones."""
        self.internal_tools = tools_by_name(tools)
        both = self.internal_tools.keys() & self._external.keys()
        if both:
            raise ToolError(f"{sorted(both)} are both internal and external tools: rename one")
        self._known = {**self.internal_tools, **self._external}
        schemas = [tool.schema for tool in self._known.values()]
        self._shown = ToolRequest(schemas) if schemas else None

    @property
    def tool_request(self) -> ToolRequest | None:
        return self._shown

    async def close(self) -> None:
        """Ends the state of the episode's tools, and closes the sources that it opened."""
        await end_episode(self.internal_tools)
        opened, self._open = self._open, []
        for source in opened:
            await source.close()

    async def act(self) -> ActResult:
        """Takes one turn: rounds of tool calls, and the message that ends it."""
        self.begin_turn()
        if self.tool_sources and not self._open:
            for source in self.tool_sources:
                self._open.append(await source.open())
            opened = [tool for source in self._open for tool in source.tools]
            self._know([*self._own_tools, *opened])
        rounds_left = self.max_tool_rounds or 0
        while True:
            call = await self.call_model(self.tool_request)
            if call is None:
                return self.out_of_context()
            asks = call.parsed.tool_calls or call.parsed.tool_call_errors  # well or badly
            # Of a message that was cut, the last call may be only half of what was meant.
            if not asks or call.response.finish_reason is FinishReason.LENGTH:
                self.record(call)
                return self.conclude(call)
            if (result := await self.act_by_tool(call)) is not None:
                return result
            if rounds_left == 0:
                return self._refuse(call)
            rounds_left -= 1
            answers = await self._answer(call, call.parsed.tool_calls)
            self._finish_round(call, answers, self.last_round_notice if rounds_left == 0 else None)

    async def act_by_tool(self, call: ModelCall) -> ActResult | None:
        """For subclasses: the turn's result if one of the calls is an action itself."""
        return None

    async def _answer(self, call: ModelCall, tool_calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result per tool call of the message, in their order. External tools run at the same
        time, beside the others, which run one after another."""
        waiting = {
            place: asyncio.ensure_future(self._call_external(tool_call))
            for place, tool_call in enumerate(tool_calls)
            if tool_call["function"]["name"] in self._external
        }
        try:
            results = {
                place: await call_tool(self._known, tool_call, timeout_s=self.tool_timeout_s)
                for place, tool_call in enumerate(tool_calls)
                if place not in waiting
            }
            results |= {place: await task for place, task in waiting.items()}
        except BaseException:  # what was sampled is kept, also when its tools were broken off
            self.record(call)
            raise
        finally:
            await ended(*waiting.values())
        return [results[place] for place in range(len(tool_calls))]

    async def _call_external(self, call: ToolCall) -> ToolResult:
        name = call["function"]["name"]
        handler = self.external_tool_handler
        if handler is None:
            raise AgentError(
                f"the model called the external tool {name!r}, but the agent has no "
                "external_tool_handler: use a protocol that sets one, or pass it as `tools`"
            )
        try:
            self._external[name].check(call["function"]["arguments"])
            async with asyncio.timeout(self.external_tool_timeout_s) as deadline:
                with contained(AgentError, f"the handler of the external tool {name!r}"):
                    return ToolResult(as_text(await handler(call)))
        except ToolError as exc:
            return ToolResult.failed(str(exc))
        except TimeoutError:
            if not deadline.expired():
                raise
            seconds = self.external_tool_timeout_s or 0.0
            return ToolResult.failed(f"tool {name!r} did not answer within {seconds:g} s")

    def _refuse(self, call: ModelCall) -> ActResult:
        """The bound is reached and the model still calls tools: they are not run, and what the
        message says besides them is taken as its answer. Without one, the turn has none."""
        refusal = ToolResult.failed("no tool calls are left in this turn; the call was not run")
        self._finish_round(call, [refusal] * len(call.parsed.tool_calls))
        result = self.conclude(call)
        if result.parse.action is not None:
            return result
        return ActResult(result.steps, self.no_answer(ROUNDS_FEEDBACK))

    def _finish_round(
        self, call: ModelCall, answers: Sequence[ToolResult], notice: str | None = None
    ) -> None:
        """Shows the model the answers to its calls, those to unreadable ones first."""
        unread = [ToolResult.failed(error) for error in call.parsed.tool_call_errors]
        most = self.max_tool_chars
        messages: list[Message] = [{"role": "tool", "content": r.shown(most)} for r in unread]
        messages += [
            tool_message(tool_call, answer.shown(most))
            for tool_call, answer in zip(call.parsed.tool_calls, answers, strict=True)
        ]
        if notice is not None:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{notice}"}
        self.ctx.on_tool_results(messages)
        errors = (result.error for result in (*unread, *answers))
        self.record(call, tuple(messages), tuple(error for error in errors if error is not None))
