"""A parent that hands subtasks to sub-agents, each with its own episode and rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from msgspec.structs import replace

from ludic.agents.base_agent import Agent
from ludic.agents.tool_agent import ExternalToolHandler, ToolAgent
from ludic.agents.tools import Tool
from ludic.envs.env import LudicEnv
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError, ProtocolError, ToolError
from ludic.interaction.base import InteractionProtocol, RunSpec, Runtime
from ludic.interaction.collector import AgentTrack
from ludic.interaction.episode import Episode
from ludic.interaction.factories import JSON, build_agent
from ludic.interaction.single_agent import only_role, play_alone
from ludic.seeding import derived
from ludic.types import Action, Info, Obs, Rollout, StepOutcome, ToolCall

AgentFactory: TypeAlias = Callable[[Sequence[Tool]], Agent]
"""Makes a fresh agent that has the given external tools; none means that it cannot delegate."""


class SubtaskEnv(SingleAgentEnv):
    """Shows the task, and takes the first action as the answer. Gives no reward."""

    blocking: ClassVar[bool] = False

    def __init__(self, task: str) -> None:
        self._task = task

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        return self._task, {}

    def env_step(self, action: Action) -> StepOutcome:
        return StepOutcome("", 0.0, terminated=True)

    def env_current_obs(self) -> Obs:
        return self._task


@dataclass(frozen=True, slots=True)
class SubAgent:
    """A kind of sub-agent. The parent sees a tool of its name with `description`, and calls it
    with a task; the sub-agent then plays `make_env(task)`, and its last action is the answer."""

    description: str
    make_agent: AgentFactory
    make_env: Callable[[str], LudicEnv[Any, Any, Any]] = SubtaskEnv
    max_steps: int = 4


@dataclass(eq=False)
class DelegatingProtocol(InteractionProtocol):
    """One agent in its environment, which may start sub-agents while it thinks.

    The first rollout is the parent's; those of the sub-agents follow in the order in which they
    were started, each with its caller's rollout as `parent_id`. Sub-agents may delegate in turn,
    down to `max_depth` (the parent is at depth 0); `max_sub_agents` bounds the episode's total.
    What cannot be started, or fails, is told to the caller as the tool's answer.

    With `child_reward="parent"` every sub-agent's last step gets the parent's total reward as a
    component, since the subtask itself has none; with `"none"` it gets only what its own
    environment and parser gave.
    """

    parent: AgentFactory
    sub_agents: Mapping[str, SubAgent]
    _: KW_ONLY
    max_depth: int = 1
    max_sub_agents: int = 8
    child_reward: Literal["parent", "none"] = "parent"

    def __post_init__(self) -> None:
        if not self.sub_agents:
            raise ConfigError("DelegatingProtocol needs at least one kind of sub-agent")
        if self.max_depth < 1 or self.max_sub_agents < 1:
            raise ConfigError(
                f"max_depth={self.max_depth} and max_sub_agents={self.max_sub_agents}: both must "
                "be >= 1"
            )
        if self.child_reward not in ("parent", "none"):
            raise ConfigError(f"child_reward={self.child_reward!r}: must be 'parent' or 'none'")
        self._tools = [_tool_of(name, sub) for name, sub in self.sub_agents.items()]

    async def run(self, env: LudicEnv[Any, Any, Any], spec: RunSpec) -> list[Rollout]:
        episode = Episode(env, spec)
        family: list[Episode] = []  # of the sub-agents, in the order of their start
        await episode.play(lambda: self._play(family, episode))
        self._settle(family, episode)
        return [r for e in (episode, *family) for r in e.rollouts()]

    async def _play(self, family: list[Episode], episode: Episode) -> None:
        openings = await episode.reset()
        role = only_role(episode)
        if role in self.sub_agents:  # credit would compare it with its caller
            raise ProtocolError(f"a sub-agent is named {role!r}, as the parent is: rename it")
        track = episode.open_track(role)
        track.meta["depth"] = 0
        agent = self._make(self.parent, family, episode, track, depth=0)
        await play_alone(agent, track, episode, role, openings)

    def _make(
        self,
        factory: AgentFactory,
        family: list[Episode],
        episode: Episode,
        track: AgentTrack,
        *,
        depth: int,
    ) -> Agent:
        """A fresh agent whose calls of external tools start sub-agents one level below."""
        agent = factory(self._tools if depth < self.max_depth else [])
        if isinstance(agent, ToolAgent):
            agent.external_tool_handler = self._handler(family, episode, track, depth + 1)
        elif depth == 0:
            raise ProtocolError(
                f"the parent is a {type(agent).__name__}, which cannot call tools: make a "
                "ToolAgent or a ReActAgent with the external_tools that the factory is given"
            )
        return agent

    def _handler(
        self, family: list[Episode], caller: Episode, caller_track: AgentTrack, depth: int
    ) -> ExternalToolHandler:
        started = 0

        async def handle(call: ToolCall) -> str:
            nonlocal started
            name = call["function"]["name"]
            sub = self.sub_agents.get(name)
            if sub is None:
                raise ProtocolError(f"the external tool {name!r} is not one of the sub-agents")
            if len(family) >= self.max_sub_agents:
                raise ToolError(f"no more than {self.max_sub_agents} sub-agents may be started")
            place, started = started, started + 1
            task = str(call["function"]["arguments"]["task"])
            episode = Episode(sub.make_env(task), _spec_of_child(caller.spec, sub, place))
            family.append(episode)
            parent = caller_track.rollout_id
            track = AgentTrack(name, f"{parent}/{name}-{place}", parent_id=parent)
            track.meta |= {"depth": depth, "task": task}
            episode.add_track(track)
            agent = self._make(sub.make_agent, family, episode, track, depth=depth)

            async def play() -> None:
                openings = await episode.reset()
                await play_alone(agent, track, episode, only_role(episode), openings)

            try:
                await episode.play(play)
            except BaseException:
                episode.fail(ProtocolError(f"the sub-agent {name!r} was broken off by its caller"))
                raise
            answer = track.last_action()
            if episode.error is not None:
                raise ToolError(f"the sub-agent {name!r} failed: {episode.error}")
            if answer is None:
                raise ToolError(f"the sub-agent {name!r} did not answer")
            return answer

        return handle

    def _settle(self, family: list[Episode], episode: Episode) -> None:
        """When the parent is done: its failure is its sub-agents' too, and so is its reward."""
        for child in family:
            if episode.error is not None:
                child.fail(ProtocolError(f"the parent's episode failed: {episode.error}"))
            elif child.error is None and self.child_reward == "parent":
                for track in child.tracks:
                    track.add_bonus("parent", episode.tracks[0].total_reward)


def _tool_of(name: str, sub: SubAgent) -> Tool:
    async def delegate(task: str) -> str:
        """Hands a subtask to a sub-agent.

        Args:
            task: What to do, with everything that must be known to do it.
        """
        raise AssertionError("an external tool is run by the protocol")

    return Tool.of(delegate, name=name, description=sub.description)


def _spec_of_child(spec: RunSpec, sub: SubAgent, place: int) -> RunSpec:
    return replace(
        spec,
        env_seed=derived(spec.env_seed, "sub_agent", place),
        sampling_seed=derived(spec.sampling_seed, "sub_agent", place),
        max_steps=sub.max_steps,
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
