"""Programs that a run's environments and tools need: missed before anything is played."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ludic.agents import Agent, ToolAgent
from ludic.envs import build_env
from ludic.envs.running.runner import close_env
from ludic.interaction import (
    DelegatingProtocol,
    InteractionProtocol,
    MultiAgentProtocol,
    Runtime,
    SingleAgentSyncProtocol,
)
from ludic.registry import make_protocol
from ludic.rollouts import RolloutRequest
from ludic.types import AgentID, EnvSpec


def check_needs(requests: Iterable[RolloutRequest], runtime: Runtime) -> None:
    """Raises if this machine lacks a program that an environment or a tool needs."""
    for request in requests:
        env = build_env(request.env)
        try:
            ask(env)
        finally:
            close_env(env, request.env.kind)
        protocol = make_protocol(request.protocol.kind, runtime, **request.protocol.kwargs)
        check_tools(agents_of(protocol, request))


def check_tools(agents: Iterable[Agent]) -> None:
    """Raises if this machine lacks a program that one of the agents' tools needs."""
    for agent in agents:
        if isinstance(agent, ToolAgent):
            for tool in agent.tools.values():
                ask(tool.function)


def ask(part: Any) -> None:
    """Calls `check_machine` of an environment or a tool, if it has one."""
    check = getattr(part, "check_machine", None)
    if callable(check):
        check()


def agents_of(
    protocol: InteractionProtocol, request: RolloutRequest, *, trained: bool = False
) -> list[Agent]:
    """The agents of a protocol, or only those that leave rollouts to train on."""
    players: list[Any] = []
    if isinstance(protocol, SingleAgentSyncProtocol):
        players = [protocol.agent]
    elif isinstance(protocol, MultiAgentProtocol):
        others = protocol.uncollected if trained else ()
        players = [p for seat, p in protocol.players.items() if seat not in others]
        if protocol.default is not None:
            seats = seats_of(request.env)
            players += [protocol.default(seat) for seat in seats if seat not in protocol.players]
    elif isinstance(protocol, DelegatingProtocol):
        factories = (protocol.parent, *(s.make_agent for s in protocol.sub_agents.values()))
        players = [make_agent(()) for make_agent in factories]
    return [player for player in players if isinstance(player, Agent)]


def seats_of(spec: EnvSpec) -> tuple[AgentID, ...]:
    """The agents of an environment, which is built for that and closed."""
    env = build_env(spec)
    try:
        return tuple(env.agent_ids)
    finally:
        close_env(env, spec.kind)
