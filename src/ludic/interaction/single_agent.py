"""One agent and its environment, turn by turn."""

from __future__ import annotations

from typing import Any

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.errors import ProtocolError
from ludic.interaction.base import InteractionProtocol, RunSpec
from ludic.interaction.collector import AgentTrack
from ludic.interaction.episode import Episode, Openings, begin_agent, take_turn
from ludic.rewards.functions import Rewards, rewards_of
from ludic.types import AgentID, Rollout, TruncationReason


class SingleAgentSyncProtocol(InteractionProtocol):
    """act, step, hear; until the environment, a limit or the context window ends it.

    The environment is closed when the episode is over, however it ends. What the functions in
    `reward` say of the agent's last action is added to the environment's reward.
    """

    def __init__(self, agent: Agent, reward: Rewards | None = None) -> None:
        self.agent = agent
        self.reward = rewards_of(reward)

    async def run(self, env: LudicEnv[Any, Any, Any], spec: RunSpec) -> list[Rollout]:
        episode = Episode(env, spec)
        await episode.play(lambda: self._play(episode))
        return episode.rollouts()

    async def _play(self, episode: Episode) -> None:
        openings = await episode.reset()
        role = only_role(episode)
        track = episode.open_track(role)
        await play_alone(self.agent, track, episode, role, openings)
        await episode.judge(self.reward)


def only_role(episode: Episode) -> AgentID:
    """The environment's one agent; `ProtocolError` when there are several."""
    ids = episode.runner.agent_ids
    if len(ids) != 1:
        raise ProtocolError(
            f"this protocol plays with one agent, the environment has {list(ids)}: use "
            "MultiAgentProtocol"
        )
    return ids[0]


async def play_alone(
    agent: Agent, track: AgentTrack, episode: Episode, role: AgentID, openings: Openings
) -> None:
    """The loop itself: the turns of the only agent, from the opening to an ending."""
    begin_agent(agent, episode, track, role, openings)
    step = episode.runner.step
    for _ in range(episode.spec.max_steps):
        act = await take_turn(agent, track)
        if act.truncation is not None:
            track.cut_turn(act, act.truncation)
            return
        action = act.parse.action
        if action is None:
            agent.on_after_step(*track.add_parse_failure(act))
            continue
        try:
            outcome = (await step({role: action}))[role]
        except BaseException:
            track.add_interrupted(act.steps, action)
            raise
        track.add_outcome(outcome, act)
        agent.on_after_step(outcome.obs, outcome.info)
        if track.ended:
            return
    track.cut(TruncationReason.MAX_STEPS)
