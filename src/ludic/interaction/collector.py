"""Gathers what happens to each agent and makes rollouts of it.

A turn's index counts the agent's own turns: one per `act`, whether or not it gave an action. What
an agent hears without having acted carries its previous turn's index and no `agent_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ludic.agents.base_agent import ActResult
from ludic.errors import AgentError
from ludic.interaction.base import RunSpec
from ludic.types import (
    Action,
    AgentID,
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Info,
    Obs,
    Rollout,
    Step,
    StepOutcome,
    TruncationReason,
)

UNREADABLE = "Your reply could not be read as an action. Answer again in the required form."


class AgentTrack(Struct, eq=False):
    """One agent's steps of one episode, in order. Only the episode's own task writes to it."""

    agent_id: AgentID
    rollout_id: str
    parent_id: str | None = None
    collected: bool = True
    meta: dict[str, Any] = {}
    obs: Obs = ""
    ended: bool = False
    _steps: list[Step] = []
    """Ends with an environment step, unless it is empty."""
    _turns: int = 0

    @property
    def steps(self) -> Sequence[Step]:
        """What was recorded so far."""
        return tuple(self._steps)

    @property
    def total_reward(self) -> float:
        return sum(s.reward for s in self._steps if isinstance(s, EnvironmentStep))

    def add_parse_failure(self, act: ActResult) -> tuple[Obs, Info]:
        """Records a turn that gave no action; returns what the agent is to be told."""
        feedback = act.parse.obs or UNREADABLE
        info = {"parse_error": True, "parse_error_kind": _kind_of_failure(act.steps)}
        self._add(act.steps, stepped=False, next_obs=feedback, info=info, **_parser_reward(act))
        return feedback, info

    def add_outcome(self, outcome: StepOutcome, act: ActResult | None = None) -> None:
        """Records what the environment told this agent: after `act`, or although it only
        listened."""
        components = _env_components(outcome)
        parser_reward = 0.0
        if act is not None:
            parser_reward = float(act.parse.reward)
            components["parser"] = components.get("parser", 0.0) + parser_reward
        self._add(
            () if act is None else act.steps,
            acted=act is not None,
            action=None if act is None else act.parse.action,
            next_obs=outcome.obs,
            reward=float(outcome.reward) + parser_reward,
            reward_components=components,
            terminated=outcome.terminated,
            truncation_reason=TruncationReason.ENV_LIMIT if outcome.truncated else None,
            info=outcome.info,
        )
        self.ended = outcome.terminated or outcome.truncated

    def add_compaction(self, calls: tuple[AgentStep, ...], info: Info) -> None:
        """Records that the agent's dialogue was compacted: a turn that is no step, gives no reward
        and is not discounted."""
        self._add(calls, stepped=False, info=info)

    def cut_turn(self, act: ActResult, reason: TruncationReason) -> None:
        """Ends the episode in the middle of this turn: it had model calls, but the environment
        was not stepped. A turn without any call leaves the flag on the step before."""
        if not act.steps:
            self.cut(reason)
            return
        self._add(
            act.steps,
            action=act.parse.action,
            stepped=False,
            truncation_reason=reason,
            **_parser_reward(act),
        )
        self.ended = True

    def add_interrupted(
        self, steps: tuple[AgentStep, ...], action: Action | None = None, info: Info | None = None
    ) -> None:
        """Keeps the model calls of a turn that an error or a deadline broke off."""
        if steps:
            self._add(steps, action=action, stepped=False, info=info)

    def cut(self, reason: TruncationReason) -> None:
        """Truncates: the flag goes onto the last step that happened. Where the agent never came
        to a step, one that was not taken holds it. An episode that is over stays as it is."""
        if self.ended:
            return
        if not self._steps:
            self._add((), acted=False, stepped=False)
        self._steps[-1] = replace(self._last_step, truncated=True, truncation_reason=reason)
        self.ended = True

    def fail(self, reason: TruncationReason) -> None:
        """Truncates because of a failure; what never began stays empty."""
        if self._steps:
            self.cut(reason)

    def add_bonus(self, name: str, reward: float) -> None:
        """Adds a reward component to the last step, where there is one."""
        if not self._steps:
            return
        step = self._last_step
        components = {**step.reward_components, name: reward}
        self._steps[-1] = replace(step, reward=step.reward + reward, reward_components=components)

    def last_action(self) -> Action | None:
        """The last action that the environment was stepped with."""
        taken = (s for s in reversed(self._steps) if isinstance(s, EnvironmentStep) and s.stepped)
        return next((step.action for step in taken if step.action is not None), None)

    def build(self, spec: RunSpec, *, task_key: str | None, error: str | None) -> Rollout:
        """The rollout. The group and the specs are for the caller to fill in."""
        return Rollout(
            id=self.rollout_id,
            steps=tuple(self._steps),
            agent_id=self.agent_id,
            episode_id=spec.episode_id,
            task_key=task_key,
            parent_id=self.parent_id,
            env_seed=spec.env_seed,
            sampling_seed=spec.sampling_seed,
            error=error,
            meta=self.meta,
        )

    def _add(
        self,
        calls: tuple[AgentStep, ...],
        *,
        acted: bool = True,
        action: Action | None = None,
        next_obs: Obs = "",
        reward: float = 0.0,
        terminated: bool = False,
        truncation_reason: TruncationReason | None = None,
        stepped: bool = True,
        reward_components: Mapping[str, float] | None = None,
        info: Info | None = None,
    ) -> None:
        """Appends an environment step, after the model calls of its turn if the agent acted."""
        if acted and not calls:
            raise AgentError(
                f"agent {self.agent_id!r} acted without a model call: act() must return one "
                "AgentStep for each, unless it was truncated"
            )
        turn, start = self._turns if acted else max(self._turns - 1, 0), len(self._steps)
        for call in calls:
            self._steps.append(call if call.turn_index == turn else replace(call, turn_index=turn))
        self._turns += acted
        self._steps.append(
            EnvironmentStep(
                turn,
                tuple(range(start, len(self._steps))),
                self.obs,
                action,
                next_obs,
                reward,
                terminated,
                truncation_reason is not None,
                truncation_reason,
                stepped,
                reward_components or {},
                info or {},
            )
        )
        self.obs = next_obs or self.obs

    @property
    def _last_step(self) -> EnvironmentStep:
        step = self._steps[-1]
        assert isinstance(step, EnvironmentStep)
        return step


def _parser_reward(act: ActResult) -> dict[str, Any]:
    """The reward of a turn in which the environment was not stepped."""
    reward = float(act.parse.reward)
    return {"reward": reward, "reward_components": {"parser": reward}}


def _kind_of_failure(steps: Sequence[AgentStep]) -> str:
    last = steps[-1]
    if last.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if last.tool_messages else "format"


def _env_components(outcome: StepOutcome) -> dict[str, float]:
    """The environment's own components, and as "env" what they leave of its reward."""
    if not outcome.reward_components:
        return {"env": float(outcome.reward)}
    components = {name: float(value) for name, value in outcome.reward_components.items()}
    rest = float(outcome.reward) - math.fsum(components.values())
    if abs(rest) > 1e-9 * max(1.0, abs(outcome.reward)):
        components["env"] = components.get("env", 0.0) + rest
    return components
