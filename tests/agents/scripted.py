"""Agents over a scripted client and a tiny tokenizer, for the tests of agents and protocols."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, overload

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.inference import HermesToolParser, HFChatTemplate, InferenceSpec, SamplingConfig
from ludic.inference.scripted_client import ScriptedCall, ScriptedChatClient
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import Runtime
from ludic.parsers import xml_parser
from ludic.types import AgentStep

A = TypeVar("A", bound=Agent)

Script = Sequence[str] | Callable[[ScriptedCall], Any]

# Qwen's way with tools: the schemas stand in the system message, calls are spelled as JSON in
# tags, and answers come back in a user's block.
TOOL_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{% endif %}
{{- '<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message['content'] | STRIP }}
{%- for call in message['tool_calls'] or [] %}
{%- if message['content'] or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message['role'] == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif message['role'] == 'user' %}
{{- '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
""".replace(" | STRIP", "")

# The same, but calls are spelled the other way round: what was sampled is not what is rendered.
FORKING_TEMPLATE = TOOL_TEMPLATE.replace(
    """'<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson }}
{{- '}""",
    """'<tool_call>\\n{"arguments": ' }}
{{- call['function']['arguments'] | tojson }}
{{- ', "name": "' + call['function']['name'] + '"}""",
)
assert FORKING_TEMPLATE != TOOL_TEMPLATE


@cache
def tiny_template() -> HFChatTemplate:
    """One tokenizer for all tests, as the library asks for."""
    return HFChatTemplate(tiny_tokenizer(), HermesToolParser())


def template_of(tokenizer: Any, source: str) -> HFChatTemplate:
    """A copy of the tokenizer with another chat template."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = source
    return HFChatTemplate(tokenizer, HermesToolParser())


@overload
def scripted_agent(script: Script, **kwargs: Any) -> Agent: ...
@overload
def scripted_agent(script: Script, cls: type[A], **kwargs: Any) -> A: ...
def scripted_agent(
    script: Script,
    cls: type[Agent] = Agent,
    *,
    template: HFChatTemplate | None = None,
    sampling: SamplingConfig | None = None,
    ctx: Any = None,
    parser: Any = None,
    client: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Agent:
    """An agent whose model says the script; actions stand in `<move>` tags."""
    template = template or tiny_template()
    return cls(
        ScriptedChatClient(script, template, **(client or {})),
        "scripted",
        ctx or FullDialog(),
        parser or xml_parser("move", success_reward=0.25, error_reward=-0.5),
        template,
        inference=InferenceSpec(sampling or SamplingConfig()),
        **kwargs,
    )


def scripted_runtime(script: Script, **client: Any) -> Runtime:
    """What a protocol's factory gets."""
    template = tiny_template()
    return Runtime(ScriptedChatClient(script, template, **client), template, "scripted")


def move(action: str) -> str:
    """An answer that parses."""
    return f"<move>{action}</move>"


def tool_call(name: str, **arguments: Any) -> str:
    """An answer that calls a tool, as models of the Hermes kind spell it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def roles(step: AgentStep) -> list[str]:
    """The roles of the messages that are new in this call."""
    return [m["role"] for m in step.new_messages]
