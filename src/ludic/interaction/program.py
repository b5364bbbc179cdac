"""A program plays an episode, and the environment or a reward function judges it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ludic.agents.base_agent import ActResult
from ludic.agents.programs.agent import ProgramAgent
from ludic.errors import ConfigError
from ludic.interaction.base import Runtime
from ludic.interaction.episode import Episode, begin_agent, opening_of
from ludic.interaction.factories import build_agent
from ludic.interaction.single_agent import SingleAgentSyncProtocol, only_role
from ludic.rewards import Attempt, RewardSum
from ludic.rewards.functions import Rewards, score
from ludic.types import Info, Message, StepOutcome, TruncationReason


@dataclass(frozen=True, slots=True)
class ProgramAttempt(Attempt):
    """What a reward function of a program is given. `question` is the task, `answer` what the
    program printed or returned (empty unless its `status` is 0), and `target` the environment's, if
    it tells one. `outcome` is what the environment said to the answer; None if there was none that
    the parser could read. `status` is None at a deadline."""

    messages: tuple[Message, ...] = ()
    stdout: str = ""
    stderr: str = ""
    status: int | None = 0
    outcome: StepOutcome | None = None
    info: Info = field(default_factory=dict)
    task_key: str | None = None


class ProgramProtocol(SingleAgentSyncProtocol):
    """Lets a program do the environment's task.

    Without `reward`, the environment judges each answer, and the program is started once for every
    observation until the episode is over. With `reward`, it is started once, and the sum of these
    functions is the reward instead of the environment's. They also judge programs that failed or
    ran out of time, as long as these made a request: that is behaviour, too.
    """

    agent: ProgramAgent

    def __init__(self, agent: ProgramAgent, reward: Rewards | None = None) -> None:
        super().__init__(agent, reward)
        if not isinstance(agent, ProgramAgent):
            raise ConfigError(f"a program is played by a ProgramAgent, not {agent!r}")

    async def _play(self, episode: Episode) -> None:
        if self.reward is None:
            await super()._play(episode)
        else:
            await self._play_once(episode, self.reward)

    async def _play_once(self, episode: Episode, reward: RewardSum) -> None:
        openings = await episode.reset()
        role = only_role(episode)
        track = episode.open_track(role)
        begin_agent(self.agent, episode, track, role, openings)
        try:
            result = await self.agent.run_program()
            if not result.steps and (error := self.agent.failure_of(result)):
                raise error
            act = ActResult(result.steps, self.agent.parser(result.answer))
            outcome = None
            if result.status == 0 and act.parse.action is not None:
                outcome = (await episode.runner.step({role: act.parse.action}))[role]
            obs, info = opening_of(openings, role)
            attempt = ProgramAttempt(
                answer=result.answer,
                target=str(outcome.info.get("target", "")) if outcome else "",
                question=obs,
                messages=result.messages,
                stdout=result.stdout,
                stderr=result.stderr,
                status=result.status,
                outcome=outcome,
                info=info,
                task_key=episode.task_key,
            )
            verdict = await score(reward, attempt, episode.spec.step_timeout_s)
        except BaseException:
            track.add_interrupted(self.agent.steps_of_turn)
            raise
        cut = TruncationReason.DEADLINE if result.timed_out else result.cut
        if result.status == 0:
            cut = None
        told = {"status": result.status, **(outcome.info if outcome else {})}
        parts = verdict.components
        judged = StepOutcome(
            "", verdict.reward, terminated=cut is None, info=told, reward_components=parts
        )
        track.add_outcome(judged, act)
        if cut is not None:
            track.cut(cut)


def program_protocol(
    runtime: Runtime, *, reward: Rewards | None = None, **agent_kwargs: Any
) -> ProgramProtocol:
    """A program as the agent. `command` or `function` says which; the other arguments are those of
    `ProgramAgent` and `build_agent`."""
    agent = build_agent(runtime, **{"agent": "program", **agent_kwargs})
    if not isinstance(agent, ProgramAgent):
        raise ConfigError(f"protocol 'program' plays with a program, not with {agent!r}")
    return ProgramProtocol(agent, reward)
