"""Agents from JSON, and the protocol of one: what the registry calls with a runtime and a run
file's arguments. Each of the other protocols has this in its own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.agents.mcp import mcp_server
from ludic.agents.tools import Tool
from ludic.errors import UnknownNameError
from ludic.interaction.base import Runtime
from ludic.interaction.single_agent import SingleAgentSyncProtocol
from ludic.parsers import parser_maker
from ludic.registry import AGENTS, CONTEXTS, get_tool
from ludic.rewards.functions import Rewards, rewards_of

JSON = Mapping[str, Any]


def build_agent(runtime: Runtime, **options: Any) -> Agent:
    """A fresh agent by its registered name; the options are those of `agent_maker`."""
    return agent_maker(runtime, **options)()


def agent_maker(
    runtime: Runtime,
    *,
    agent: str = "agent",
    parser: str | JSON | Sequence[Any] = "text",
    context: str | JSON = "full_dialog",
    system_prompt: str | None = None,
    tools: Sequence[str] = (),
    mcp: JSON | Sequence[JSON] = (),
    client: str | None = None,
    external_tools: Sequence[Tool] = (),
    **agent_kwargs: Any,
) -> Callable[[], Agent]:
    """Returns what builds a fresh agent as often as it is called; names are looked up once.

    `agent` and `tools` are registered names; `parser` and `context` are a name or a mapping with
    "kind"; `mcp` are servers whose tools are added, each as the arguments of
    `ludic.agents.mcp.MCPServer`; `client` names one of `runtime.others`; the rest goes to the
    agent's constructor as it is.
    """
    if client is not None:
        if client not in runtime.others:
            raise UnknownNameError("client", client, runtime.others)
        runtime = runtime.others[client]
    functions = [get_tool(name) for name in tools]
    servers: Sequence[JSON] = ([mcp] if isinstance(mcp, Mapping) else mcp) if mcp else ()
    new_context, new_parser = CONTEXTS.maker(context), parser_maker(parser)
    factory = AGENTS.get(agent)

    def make() -> Agent:
        arguments = {
            "client": runtime.client,
            "model": runtime.model,
            "ctx": new_context(),
            "parser": new_parser(),
            "chat_template": runtime.chat_template,
            "inference": runtime.inference,
            "system_prompt": system_prompt,
            **agent_kwargs,
        }
        if functions:
            arguments["tools"] = list(functions)
        if external_tools:
            arguments["external_tools"] = external_tools
        if servers:
            arguments["tool_sources"] = [mcp_server(server) for server in servers]
        return AGENTS.make_with(factory, agent, (), arguments)  # type: ignore[no-any-return]

    return make


def single_agent_protocol(runtime: Runtime, **agent_kwargs: Any) -> SingleAgentSyncProtocol:
    """One agent; the arguments are those of `build_agent`. `reward` names reward functions, a judge
    among them, that are asked for each agent at its end, beside the environment."""
    return single_agent_maker(runtime, **agent_kwargs)()


def single_agent_maker(
    runtime: Runtime, *, reward: Rewards | None = None, **agent_kwargs: Any
) -> Callable[[], SingleAgentSyncProtocol]:
    """Returns what does `single_agent_protocol` as often as it is called; names are looked up
    once."""
    new_agent, functions = agent_maker(runtime, **agent_kwargs), rewards_of(reward)
    return lambda: SingleAgentSyncProtocol(new_agent(), functions)
