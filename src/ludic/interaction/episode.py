"""What every protocol's episode has around it: deadlines, failures, rewards beside the
environment's, and the closing of the environment."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from ludic.agents.base_agent import ActResult, Agent
from ludic.envs.env import LudicEnv
from ludic.envs.runner import EnvRunner
from ludic.errors import (
    AgentError,
    ConfigError,
    DeadlineError,
    MissingExtraError,
    ProtocolError,
    UnknownNameError,
)
from ludic.interaction.base import RunSpec
from ludic.interaction.collector import AgentTrack
from ludic.parsers import ParseResult
from ludic.plumbing.text import TRACEBACK, clean_text, described, error_text, users_traceback
from ludic.rewards import RewardSum
from ludic.rewards.functions import attempt_of, score
from ludic.seeding import derived
from ludic.types import AgentID, Info, Obs, Rollout, TruncationReason
from ludic.workers.deadlines import deadline
from ludic.workers.threads import is_for_us

Openings: TypeAlias = Mapping[AgentID, tuple[Obs, Info]]

_log = logging.getLogger("ludic.interaction")

CONFIGURATION_ERRORS = (ConfigError, MissingExtraError, ProtocolError, UnknownNameError)
"""Errors that would fail every episode alike: they propagate instead of costing one."""

_IN_PLAY: set[int] = set()
"""The environments and contexts of all episodes under way, by `id`. Threads with event loops of
their own may share it: each call of a set is one step."""


class Episode:
    """One episode under way: its environment, its limits, and the tracks of those who take part.

    Tracks are returned in the order in which they were opened. `add_track` may be called while
    the episode runs: sub-agents join late.
    """

    def __init__(
        self, env: LudicEnv[Any, Any, Any], spec: RunSpec, *, uncollected: Collection[AgentID] = ()
    ) -> None:
        if spec.max_steps < 1:
            raise ConfigError(f"RunSpec.max_steps={spec.max_steps}: must be >= 1")
        self.spec = spec
        self.uncollected = frozenset(uncollected)
        self.runner = EnvRunner(env, step_timeout_s=spec.step_timeout_s)
        self.tracks: list[AgentTrack] = []
        self.agents: list[Agent] = []
        self._claimed: set[int] = set()
        self.error: str | None = None
        self.task_key: str | None = None

    def add_track(self, track: AgentTrack) -> AgentTrack:
        self.tracks.append(track)
        return track

    def claim(self, part: object) -> None:
        """Keeps an environment or a context to this episode until it is over: in two at a time, it
        would mix them. Raises `ConfigError` where another has it."""
        key = id(part)
        if key in _IN_PLAY:
            raise ConfigError(
                f"episode {self.spec.episode_id!r} was given a {type(part).__name__} that is in "
                "use in an episode under way: make an environment for each episode, and an agent "
                "with its own context for each role of each"
            )
        _IN_PLAY.add(key)
        self._claimed.add(key)

    def open_track(self, agent_id: AgentID) -> AgentTrack:
        """A new track for one of the environment's agents."""
        collected = agent_id not in self.uncollected
        rollout_id = f"{self.spec.episode_id}/{agent_id}"
        return self.add_track(AgentTrack(agent_id, rollout_id, collected=collected))

    async def play(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Runs `loop` to its end, its failure or its deadline; then closes the environment and the
        agents.

        A failure is recorded on every track, also one that is no `Exception`. Cancellation from
        outside, Ctrl-C and errors of configuration propagate.
        """
        limit = self.spec.episode_timeout_s
        self.claim(self.runner.env)
        try:
            with deadline(limit) as over:
                await loop()
        except CONFIGURATION_ERRORS:
            raise
        except BaseException as exc:
            if is_for_us(exc):
                raise
            if isinstance(exc, TimeoutError) and over.expired:
                exc = DeadlineError("the end of the episode", self.spec.episode_id, limit or 0.0)
            self.fail(exc)
        finally:
            try:
                await self.runner.close()
                for agent in self.agents:
                    try:
                        await agent.close()
                    except BaseException as exc:  # the episode is over: nothing is left to save
                        if is_for_us(exc):
                            raise
                        _log.warning("an agent was not closed properly: %s", error_text(exc))
            finally:
                _IN_PLAY.difference_update(self._claimed)

    async def reset(self) -> Openings:
        """Begins the episode; what each agent first sees."""
        openings = await self.runner.reset(self.spec.env_seed)
        self.task_key = self.runner.task_key()
        return openings

    async def judge(self, rewards: RewardSum | None) -> None:
        """Adds what reward functions beside the environment give for each agent, a judge's say: its
        last action is the answer, and what came before it the question. An agent that never came to
        an action has nothing to be judged."""
        if rewards is None:
            return
        for track in self.tracks:
            if track.collected and (attempt := attempt_of(track.steps)) is not None:
                verdict = await score(rewards, attempt, self.spec.step_timeout_s)
                for name, reward in verdict.components.items():
                    track.add_bonus(name, reward)

    def rollouts(self) -> list[Rollout]:
        """One rollout per track that is collected."""
        return [
            track.build(self.spec, task_key=self.task_key, error=self.error)
            for track in self.tracks
            if track.collected
        ]

    def fail(self, exc: BaseException) -> None:
        """Records the failure on every track; the first one counts."""
        if self.error is not None:
            return
        self.error, trace = described(exc), users_traceback(exc)
        if not self.tracks:  # it failed before anybody took part, and must still be counted
            for agent_id in self._roles():
                self.open_track(agent_id)
        late = isinstance(exc, DeadlineError)
        reason = TruncationReason.DEADLINE if late else TruncationReason.ERROR
        for track in self.tracks:
            track.fail(reason)
            track.meta |= {TRACEBACK: trace} if trace else {}

    def _roles(self) -> Sequence[AgentID]:
        """The environment's agents; some environments do not know them before a reset."""
        try:
            roles = tuple(self.runner.env.agent_ids)
        except BaseException as exc:
            if is_for_us(exc):
                raise
            roles = ()
        named = all(isinstance(role, str) and clean_text(role) == role for role in roles)
        return roles if roles and named else ("agent",)


def begin_agent(
    agent: Agent, episode: Episode, track: AgentTrack, role: AgentID, openings: Openings
) -> None:
    """Resets the agent, with its own seed and conversation, and shows it the opening. The agent's
    system prompt takes precedence over the one that the environment suggests for its role."""
    prompt = agent.system_prompt
    if prompt is None:
        prompt = episode.runner.suggested_sysprompt(role)
    episode.claim(agent.ctx)
    episode.agents.append(agent)
    seed = derived(episode.spec.sampling_seed, "agent", role)
    agent.reset(prompt, seed=seed, conversation_id=track.rollout_id)
    track.obs, info = opening_of(openings, role)
    agent.on_env_reset(track.obs, info)


async def take_turn(agent: Agent, track: AgentTrack) -> ActResult:
    """Lets the agent act, and compact its dialogue before that; the model calls of a turn that
    breaks off are kept."""
    try:
        if agent.compactor is not None and (info := await agent.compact()) is not None:
            track.add_compaction(agent.steps_of_turn, info)
        act = await agent.act()
        if not isinstance(act, ActResult) or not isinstance(act.parse, ParseResult):
            raise AgentError(
                f"act() of agent {track.agent_id!r} must return an ActResult and its parser a "
                f"ParseResult, not {act.parse if isinstance(act, ActResult) else act!r}"
            )
        return act
    except BaseException:
        compactor = agent.compactor
        track.add_interrupted(agent.steps_of_turn, info=compactor.info if compactor else None)
        raise


def opening_of(openings: Openings, agent_id: AgentID) -> tuple[Obs, Info]:
    """What the agent first sees; an agent that the environment does not open for sees nothing."""
    return openings.get(agent_id, ("", {}))
