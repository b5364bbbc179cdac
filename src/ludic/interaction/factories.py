"""Protocols from JSON: what the registry calls with a runtime and a run file's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ludic.agents.base_agent import Agent
from ludic.agents.mcp import mcp_server
from ludic.agents.programs import ProgramAgent
from ludic.agents.tools import Tool
from ludic.errors import ConfigError, UnknownNameError
from ludic.interaction.base import Runtime
from ludic.interaction.delegating import AgentFactory, DelegatingProtocol, SubAgent
from ludic.interaction.episode import Rewards, rewards_of
from ludic.interaction.multi_agent import Bot, BotFunction, MultiAgentProtocol
from ludic.interaction.program import ProgramProtocol
from ludic.interaction.single_agent import SingleAgentSyncProtocol
from ludic.parsers import parser_maker
from ludic.registry import AGENTS, BOTS, CONTEXTS, get_tool
from ludic.types import AgentID

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
        made: Agent = AGENTS.make_with(factory, agent, (), arguments)
        return made

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


def program_protocol(
    runtime: Runtime, *, reward: Rewards | None = None, **agent_kwargs: Any
) -> ProgramProtocol:
    """A program as the agent. `command` or `function` says which; the other arguments are those of
    `ProgramAgent` and `build_agent`."""
    agent = build_agent(runtime, **{"agent": "program", **agent_kwargs})
    if not isinstance(agent, ProgramAgent):
        raise ConfigError(f"protocol 'program' plays with a program, not with {agent!r}")
    return ProgramProtocol(agent, reward)


def multi_agent_protocol(
    runtime: Runtime,
    *,
    seats: Mapping[AgentID, JSON] | None = None,
    max_parse_retries: int = 3,
    reward: Rewards | None = None,
    **agent_kwargs: Any,
) -> MultiAgentProtocol:
    """Several agents; those that `seats` does not name are built from `agent_kwargs`. `reward` is
    as for one agent, and asked for each.

    A seat is `{"bot": "random", "choices": […]}`, `{"bot": "sequence", "actions": […]}`, another
    bot by name or place (`{"bot": "my_module:MyBot", …}`), or what `build_agent` takes, over the
    common arguments. A seat with another `"client"` is an opponent and leaves no rollout, unless
    it says `"collect": true`.
    """
    players: dict[AgentID, Agent | Bot | BotFunction] = {}
    uncollected: set[AgentID] = set()
    for agent_id, seat in (seats or {}).items():
        options = dict(seat)
        if "bot" in options:
            players[agent_id] = _make_bot(agent_id, options)
            continue
        if not options.pop("collect", "client" not in options):
            uncollected.add(agent_id)
        players[agent_id] = build_agent(runtime, **{**agent_kwargs, **options})
    return MultiAgentProtocol(
        players,
        default=lambda agent_id: build_agent(runtime, **agent_kwargs),
        uncollected=uncollected,
        max_parse_retries=max_parse_retries,
        reward=reward,
    )


def delegating_protocol(
    runtime: Runtime,
    *,
    sub_agents: Mapping[str, JSON],
    max_depth: int = 1,
    max_sub_agents: int = 8,
    child_reward: Literal["parent", "none"] = "parent",
    agent: str = "react",
    **agent_kwargs: Any,
) -> DelegatingProtocol:
    """A parent and its kinds of sub-agents: `{"solver": {"description": "…", "max_steps": 4,
    and what `build_agent` takes}}`. A sub-agent is a "react" agent unless it says otherwise."""
    kinds: dict[str, SubAgent] = {}
    for name, entry in sub_agents.items():
        options = dict(entry)
        if "description" not in options:
            raise ConfigError(
                f"sub-agent {name!r} needs a 'description': its caller sees only that"
            )
        description, max_steps = options.pop("description"), options.pop("max_steps", 4)
        factory = _agent_factory(runtime, {"agent": "react", **options})
        kinds[name] = SubAgent(description, factory, max_steps=max_steps)
    return DelegatingProtocol(
        _agent_factory(runtime, {"agent": agent, **agent_kwargs}),
        kinds,
        max_depth=max_depth,
        max_sub_agents=max_sub_agents,
        child_reward=child_reward,
    )


def _agent_factory(runtime: Runtime, options: JSON) -> AgentFactory:
    def make(external_tools: Sequence[Tool]) -> Agent:
        return build_agent(runtime, external_tools=external_tools, **options)

    return make


def _make_bot(agent_id: AgentID, options: dict[str, Any]) -> Bot | BotFunction:
    name = options.pop("bot")
    registry = AGENTS if name in AGENTS.names() else BOTS
    try:
        return registry.make_from({"kind": name, **options})  # type: ignore[no-any-return]
    except ConfigError as exc:
        raise ConfigError(f"seat {agent_id!r}: {exc}") from exc
