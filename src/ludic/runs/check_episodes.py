"""Checks what plays a run's episodes: its environments, its agents, and the programs they need.
Imports no torch: actors may have none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ludic.agents import Agent, ToolAgent
from ludic.envs import LudicEnv, build_env
from ludic.envs.runner import close_env
from ludic.errors import ConfigError
from ludic.inference import HFChatTemplate, ScriptedChatClient
from ludic.inference.tiny import plain_tiny_tokenizer
from ludic.interaction import (
    DelegatingProtocol,
    InteractionProtocol,
    MultiAgentProtocol,
    Runtime,
    SingleAgentSyncProtocol,
)
from ludic.registry import make_protocol
from ludic.rollouts import RolloutRequest
from ludic.runs.episodes import inference_spec, requests_of, rows_of, seats_of, tool_parser_of
from ludic.runs.settings import EnvSection, RunConfig
from ludic.runs.settings.base import configuring
from ludic.types import EnvSpec

if TYPE_CHECKING:
    from ludic.training.credit_assignment.value_tracker import TrackedAdvantage

Env: TypeAlias = LudicEnv[Any, Any, Any]


def check_episodes(config: RunConfig, tracked: TrackedAdvantage | None = None) -> None:
    """Builds the run's environments and agents, and closes them again; raises if one is missing or
    does not fit. `tracked` is the algorithm's credit if it tracks a value per task."""
    with ExitStack() as closing:
        envs = [_make_env(section, closing) for section in config.env]
        for section in config.eval.env:
            _make_env(section, closing)
        if config.eval.episodes == "all":
            for section in config.eval.env or config.env:
                rows_of(EnvSpec(section.kind, section.kwargs))
        agents = _make_agents(config)
        _check_windows(config, [*agents, *_make_agents(config, held_out=True)], envs)
        if tracked is not None:
            _check_tracking(config, tracked, envs, agents)


def check_programs(config: RunConfig, *, held_out: bool = False) -> None:
    """Raises if this machine lacks a program that an environment or a tool of the run needs: for
    what plays its episodes, or its held-out ones, without training."""
    with ExitStack() as closing:
        for section in config.eval.env if held_out and config.eval.env else config.env:
            _make_env(section, closing)
    _make_agents(config, held_out=held_out)


def _make_env(section: EnvSection, closing: ExitStack) -> Env:
    with configuring(f"environment {section.kind!r} with {section.kwargs}"):
        env = build_env(EnvSpec(section.kind, section.kwargs), isolation=section.isolation)
        closing.callback(close_env, env, section.kind)
        _ask(env)
        return env


def _make_agents(config: RunConfig, *, held_out: bool = False) -> list[Agent]:
    """Builds each protocol once, on a model that says nothing, and returns its agents."""
    template = HFChatTemplate(plain_tiny_tokenizer(), tool_parser_of(config))
    client = ScriptedChatClient([""], template)
    runtime = Runtime(client, template, config.model.name, inference_spec(config))
    others = {player.name: replace(runtime, model=player.name) for player in config.player}
    runtime = replace(runtime, others=others)
    agents: list[Agent] = []
    for request, _ in requests_of(config, held_out=held_out).values():
        spec = request.protocol
        with configuring(f"protocol {spec.kind!r}"):
            protocol = make_protocol(spec.kind, runtime, **spec.kwargs)
            for agent in _agents_of(protocol, request):
                if isinstance(agent, ToolAgent):
                    for tool in agent.internal_tools.values():
                        _ask(tool.function)
            agents += _agents_of(protocol, request, trained=True)
    return agents


def _check_windows(config: RunConfig, agents: Sequence[Agent], envs: Sequence[Env]) -> None:
    """Raises if the window of a context that compacts is too small, where it is stated. Otherwise
    it is the model's, and the first episode finds out."""
    compacting = [agent for agent in agents if agent.compactor is not None]
    stated = config.inference.max_context_tokens
    if not compacting or (any(agent.context_limit is None for agent in compacting) and not stated):
        return
    from ludic.runs.model import tokenizer_of

    template = HFChatTemplate(tokenizer_of(config), tool_parser_of(config))
    for agent in compacting:
        agent.client = ScriptedChatClient([""], template, max_context_tokens=stated)
        agent.chat_template = template
        if agent.tool_request is not None:
            agent.chat_template = template.for_tools()
        prompts = [agent.system_prompt]
        if agent.system_prompt is None:
            with suppress(Exception):  # an environment may know its prompts only after a reset
                prompts = [env.suggested_sysprompt(role) for env in envs for role in env.agent_ids]
        assert agent.compactor is not None
        for prompt in prompts:
            agent.compactor.check(prompt)


def _ask(part: Any) -> None:
    """Calls `check_machine` of an environment or a tool, if it has one."""
    check = getattr(part, "check_machine", None)
    if callable(check):
        check()


def _agents_of(
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


def _check_tracking(
    config: RunConfig, credit: TrackedAdvantage, envs: Sequence[Env], agents: Sequence[Agent]
) -> None:
    """Raises if tasks have no names, or if returns are known to leave the tracker's interval: from
    an environment's `return_range`, and from the parser's reward for an empty answer."""
    name, steps, (low, high) = config.algorithm.name, config.training.max_steps, credit.returns
    must_name = config.curriculum.kind != "uncertain"  # it names them itself
    penalty = min((agent.parser("").reward for agent in agents), default=0.0)
    for section, env in zip(config.env, envs, strict=True):
        if must_name and type(env).task_key is LudicEnv.task_key:
            raise ConfigError(
                f"algorithm {name!r} tracks a value per task, and environment {section.kind!r} "
                "names none: define its task_key(), choose another algorithm, or write a script "
                "that sets RolloutRequest.task_key"
            )
        lowest, highest = env.return_range or (max(low, 0.0), high)
        slips = steps * min(penalty, 0.0)
        if lowest + slips < low - 1e-9 or highest > high + 1e-9:
            parser = f" (the parser gives {penalty:g} for what it cannot read, up to {steps} times)"
            raise ConfigError(
                f"algorithm {name!r} tracks returns in [{low:g}, {high:g}], but in "
                f"{section.kind!r} "
                f"they can be from {lowest + slips:g} to {highest:g}{parser if slips else ''}: set "
                "algorithm.kwargs.returns = [lowest, highest], or the parser's error_reward to 0"
            )
