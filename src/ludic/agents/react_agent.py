"""Reason, act, observe: a bounded tool loop whose last round must answer."""

from __future__ import annotations

from collections.abc import Sequence

from ludic.agents.tool_agent import MAX_TOOL_CHARS, ExternalToolHandler, ToolAgent
from ludic.agents.tools import Tool, ToolFunction, ToolSource
from ludic.context.base import ContextStrategy
from ludic.errors import AgentError
from ludic.inference.client import ChatClient
from ludic.inference.sampling import InferenceSpec
from ludic.inference.templates.chat_template import ChatTemplate
from ludic.parsers import Parser


class ReActAgent(ToolAgent):
    """A tool loop of at most `max_rounds` model calls, the last of which must answer.

    The model is told so in the answers of the last tools that are run. The tools stay in the
    prompt, so that its tokens still extend the earlier ones; calls in the last round are not run.
    """

    last_round_notice = "No tool calls are left in this turn. Give your answer now."

    def __init__(
        self,
        client: ChatClient,
        model: str,
        ctx: ContextStrategy,
        parser: Parser,
        chat_template: ChatTemplate,
        *,
        max_rounds: int = 6,
        tools: Sequence[ToolFunction | Tool] = (),
        tool_sources: Sequence[ToolSource] = (),
        external_tools: Sequence[ToolFunction | Tool] = (),
        external_tool_handler: ExternalToolHandler | None = None,
        tool_timeout_s: float | None = 30.0,
        external_tool_timeout_s: float | None = 600.0,
        max_tool_chars: int | None = MAX_TOOL_CHARS,
        inference: InferenceSpec | None = None,
        system_prompt: str | None = None,
        request_timeout_s: float | None = 300.0,
    ) -> None:
        if max_rounds < 1:
            raise AgentError(f"max_rounds={max_rounds}: a turn needs at least one model call")
        super().__init__(
            client,
            model,
            ctx,
            parser,
            chat_template,
            tools=tools,
            tool_sources=tool_sources,
            external_tools=external_tools,
            external_tool_handler=external_tool_handler,
            max_tool_rounds=max_rounds - 1,
            tool_timeout_s=tool_timeout_s,
            external_tool_timeout_s=external_tool_timeout_s,
            max_tool_chars=max_tool_chars,
            inference=inference,
            system_prompt=system_prompt,
            request_timeout_s=request_timeout_s,
        )
