"""Several agents in one environment, in turns or at the same time, and players without a model."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from itertools import cycle
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ludic.agents.base_agent import ActResult, Agent
from ludic.envs.env import LudicEnv
from ludic.errors import AgentError, ConfigError, ProtocolError
from ludic.interaction.base import InteractionProtocol, RunSpec, Runtime
from ludic.interaction.episode import Episode, Openings, begin_agent, opening_of, take_turn
from ludic.interaction.factories import JSON, build_agent
from ludic.registry import AGENTS, BOTS
from ludic.rewards.functions import Rewards, rewards_of
from ludic.seeding import derived
from ludic.types import Action, AgentID, Obs, Rollout, TruncationReason
from ludic.workers.threads import contained


@runtime_checkable
class Bot(Protocol):
    """Plays one seat. It answers at once, or asynchronously; it leaves no rollout."""

    def reset(self, *, seed: int | None) -> None:
        """An episode begins. All of the bot's chances come from `seed`, which is derived from
        the environment's: the episodes of a group meet the same opponent."""

    def act(self, obs: Obs) -> Action | Awaitable[Action]:
        """Its move, given what it last saw."""
        ...


BotFunction: TypeAlias = Callable[[Obs], Action | Awaitable[Action]]


class FunctionBot:
    """A function from observation to action, as a bot."""

    def __init__(self, function: BotFunction) -> None:
        self._function = function

    def reset(self, *, seed: int | None) -> None:
        return None

    def act(self, obs: Obs) -> Action | Awaitable[Action]:
        return self._function(obs)


class SequenceBot:
    """Plays a fixed list of actions, from the beginning again when it is used up."""

    def __init__(self, actions: Sequence[Action]) -> None:
        if not actions:
            raise ConfigError("SequenceBot needs at least one action")
        self._actions = tuple(actions)
        self._coming = cycle(self._actions)

    def reset(self, *, seed: int | None) -> None:
        self._coming = cycle(self._actions)

    def act(self, obs: Obs) -> Action:
        return next(self._coming)


class RandomBot:
    """Plays one of `choices` at random, without looking."""

    def __init__(self, choices: Sequence[Action]) -> None:
        if not choices:
            raise ConfigError("RandomBot needs at least one choice")
        self._choices = tuple(choices)
        self._random = random.Random(0)

    def reset(self, *, seed: int | None) -> None:
        self._random = random.Random(seed)

    def act(self, obs: Obs) -> Action:
        return self._random.choice(self._choices)


class MultiAgentProtocol(InteractionProtocol):
    """Asks the active agents, all at once, steps the environment, and tells everybody.

    `players` maps the environment's agents to agents, bots or plain functions; `default` makes
    the players that are not named. Bots leave no rollouts, nor do the agents in `uncollected`
    (opponents that other models play).

    An answer that cannot be parsed is not a move. In turns, the agent is simply asked again.
    Among simultaneous movers the step goes on without it if the environment
    `accepts_partial_actions`; if not, the others' actions wait while it is asked again, at most
    `max_parse_retries` times, after which the episode is cut with `TruncationReason.BUDGET`.
    """

    def __init__(
        self,
        players: Mapping[AgentID, Agent | Bot | BotFunction],
        *,
        default: Callable[[AgentID], Agent | Bot | BotFunction] | None = None,
        uncollected: Collection[AgentID] = (),
        max_parse_retries: int = 3,
        reward: Rewards | None = None,
    ) -> None:
        if max_parse_retries < 0:
            raise ConfigError(f"max_parse_retries={max_parse_retries}: must be >= 0")
        self.players = dict(players)
        self.default = default
        self.uncollected = frozenset(uncollected)
        self.max_parse_retries = max_parse_retries
        self.reward = rewards_of(reward)

    async def run(self, env: LudicEnv[Any, Any, Any], spec: RunSpec) -> list[Rollout]:
        bots = {a for a, player in self.players.items() if not isinstance(player, Agent)}
        episode = Episode(env, spec, uncollected=self.uncollected | bots)
        await episode.play(lambda: self._play(episode))
        return episode.rollouts()

    async def _play(self, episode: Episode) -> None:
        openings = await episode.reset()
        game = _Game(episode, self._seat(episode.runner.agent_ids), self.max_parse_retries)
        await game.play(openings)
        await episode.judge(self.reward)

    def _seat(self, agent_ids: Sequence[AgentID]) -> dict[AgentID, Agent | Bot]:
        """A player for every role, or `ProtocolError`."""
        unknown = [a for a in (*self.players, *self.uncollected) if a not in agent_ids]
        missing = [a for a in agent_ids if a not in self.players]
        if unknown or (missing and self.default is None):
            raise ProtocolError(
                f"the environment has the agents {list(agent_ids)}: no player for {missing}, and "
                f"no such agent as {unknown}"
            )
        players: dict[AgentID, Agent | Bot] = {}
        for agent_id in agent_ids:
            player = self.players.get(agent_id)
            if player is None and self.default is not None:
                player = self.default(agent_id)
            if not isinstance(player, Agent | Bot):
                if not callable(player):
                    raise ProtocolError(f"{player!r} cannot play {agent_id!r}: not an agent or bot")
                player = FunctionBot(player)
            players[agent_id] = player
        if len({id(p) for p in players.values()}) < len(players):
            raise ProtocolError("one agent object sits on two seats: make one for each seat")
        return players


class _Game:
    """The state of one episode's loop."""

    def __init__(
        self, episode: Episode, players: Mapping[AgentID, Agent | Bot], max_parse_retries: int
    ) -> None:
        self.episode = episode
        self.players = players
        self.max_parse_retries = max_parse_retries
        self.tracks = {agent_id: episode.open_track(agent_id) for agent_id in players}
        self.acts: dict[AgentID, ActResult] = {}
        """Turns whose actions wait for the environment's step."""
        self.actions: dict[AgentID, Action] = {}
        self.failures = Counter[AgentID]()
        """Parse failures since the last step, by agent."""

    async def play(self, openings: Openings) -> None:
        self._begin(openings)
        runner = self.episode.runner
        for _ in range(self.episode.spec.max_steps):
            active = runner.active_agents
            if not active:
                return
            failed = await self._ask([a for a in active if a not in self.actions])
            if failed is None:
                return
            if failed and not (self.actions and runner.accepts_partial_actions):
                if len(active) > 1:
                    self.failures.update(failed)
                    if max(self.failures.values()) > self.max_parse_retries:
                        self._cut(TruncationReason.BUDGET)
                        return
                continue
            await self._step()
        self._cut(TruncationReason.MAX_STEPS)

    def _begin(self, openings: Openings) -> None:
        for agent_id, player in self.players.items():
            track = self.tracks[agent_id]
            if isinstance(player, Agent):
                begin_agent(player, self.episode, track, agent_id, openings)
            else:
                track.collected = False
                track.obs = opening_of(openings, agent_id)[0]
                player.reset(seed=derived(self.episode.spec.env_seed, "bot", agent_id))

    async def _ask(self, asked: Sequence[AgentID]) -> list[AgentID] | None:
        """Lets them act at the same time. Returns those without a readable action, or None when
        the context of one is full, which ends the episode."""
        failed: list[AgentID] = []
        full: TruncationReason | None = None
        for agent_id, act in (await self._moves(asked)).items():
            if isinstance(act, str):
                self.actions[agent_id] = act
            elif act.truncation is not None:
                self.tracks[agent_id].cut_turn(act, act.truncation)
                full = act.truncation
            elif act.parse.action is None:
                failed.append(agent_id)
                player = self.players[agent_id]
                assert isinstance(player, Agent)
                player.on_after_step(*self.tracks[agent_id].add_parse_failure(act))
            else:
                self.actions[agent_id] = act.parse.action
                self.acts[agent_id] = act
        if full is None:
            return failed
        self._cut(full)
        return None

    async def _moves(self, asked: Sequence[AgentID]) -> dict[AgentID, ActResult | Action]:
        if len(asked) == 1:
            return {asked[0]: await self._move(asked[0])}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {a: group.create_task(self._contained_move(a)) for a in asked}
        except BaseExceptionGroup as failure:
            for agent_id, task in tasks.items():
                if not task.cancelled() and task.exception() is None:
                    self._keep_unused(agent_id, task.result())
            raise failure.exceptions[0] from None
        return {a: task.result() for a, task in tasks.items()}

    async def _contained_move(self, agent_id: AgentID) -> ActResult | Action:
        """A move in a task of its own, where `sys.exit` would end the event loop."""
        with contained(AgentError, f"agent {agent_id!r}"):
            return await self._move(agent_id)

    async def _move(self, agent_id: AgentID) -> ActResult | Action:
        player = self.players[agent_id]
        track = self.tracks[agent_id]
        if isinstance(player, Agent):
            return await take_turn(player, track)
        action = player.act(track.obs)
        action = await action if inspect.isawaitable(action) else action
        if not isinstance(action, str):
            raise AgentError(f"the bot of {agent_id!r} gave {action!r}: an action is text")
        return action

    async def _step(self) -> None:
        """Steps the environment, and tells every agent that it has an outcome for."""
        try:
            outcomes = await self.episode.runner.step(self.actions)
        except BaseException:
            for agent_id, act in self.acts.items():
                self._keep_unused(agent_id, act)
            raise
        for agent_id, outcome in outcomes.items():
            self.tracks[agent_id].add_outcome(outcome, self.acts.get(agent_id))
            player = self.players[agent_id]
            if isinstance(player, Agent):
                player.on_after_step(outcome.obs, outcome.info)
        self.acts, self.actions = {}, {}
        self.failures.clear()

    def _keep_unused(self, agent_id: AgentID, act: ActResult | Action) -> None:
        if isinstance(act, ActResult):
            self.tracks[agent_id].add_interrupted(act.steps, act.parse.action)

    def _cut(self, reason: TruncationReason) -> None:
        """Ends the episode for all who are still in it; a turn whose action waits ends unused."""
        for agent_id, act in self.acts.items():
            self.tracks[agent_id].cut_turn(act, reason)
        for track in self.tracks.values():
            track.cut(reason)


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


def _make_bot(agent_id: AgentID, options: dict[str, Any]) -> Bot | BotFunction:
    name = options.pop("bot")
    registry = AGENTS if name in AGENTS.names() else BOTS
    try:
        return registry.make_from({"kind": name, **options})  # type: ignore[no-any-return]
    except ConfigError as exc:
        raise ConfigError(f"seat {agent_id!r}: {exc}") from exc
