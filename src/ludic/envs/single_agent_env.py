"""The contract without ids, for tasks with one agent."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import ClassVar, TypeVar

from ludic.envs.env import LudicEnv
from ludic.errors import EnvError
from ludic.types import Action, AgentID, Info, Obs, StepOutcome

T = TypeVar("T")


class SingleAgentEnv(LudicEnv[AgentID, Obs, Action]):
    """Implement `env_reset` and `env_step`, which may be `async`, and `env_current_obs` where the
    task can be looked at between two steps. `step` refuses an action while no episode runs."""

    agent_id: ClassVar[AgentID] = "agent"
    _over = True
    """Whether no episode runs."""

    @abstractmethod
    def env_reset(
        self, *, seed: int | None = None
    ) -> tuple[Obs, Info] | Awaitable[tuple[Obs, Info]]:
        """Begins an episode: the first observation, and facts about it."""

    @abstractmethod
    def env_step(self, action: Action) -> StepOutcome | Awaitable[StepOutcome]:
        """Applies one action."""

    def env_current_obs(self) -> Obs:
        """What the agent would see if it looked now; "" where the environment cannot say."""
        return ""

    @property
    def agent_ids(self) -> Sequence[AgentID]:
        return (self.agent_id,)

    @property
    def active_agents(self) -> Sequence[AgentID]:
        return (self.agent_id,)

    def reset(
        self, *, seed: int | None = None
    ) -> Mapping[AgentID, tuple[Obs, Info]] | Awaitable[Mapping[AgentID, tuple[Obs, Info]]]:
        result = self.env_reset(seed=seed)
        if not isinstance(result, tuple) and inspect.isawaitable(result):
            return self._awaited(result)
        return self._noted(result)

    def step(
        self, actions: Mapping[AgentID, Action]
    ) -> Mapping[AgentID, StepOutcome] | Awaitable[Mapping[AgentID, StepOutcome]]:
        if self._over:
            raise EnvError(
                f"{type(self).__name__} was stepped before its episode began, or after it ended: "
                "reset it first"
            )
        result = self.env_step(actions[self.agent_id])
        if not isinstance(result, StepOutcome) and inspect.isawaitable(result):
            return self._awaited(result)
        return self._noted(result)

    def current_obs(self) -> Mapping[AgentID, Obs]:
        return {self.agent_id: self.env_current_obs()}

    async def _awaited(self, result: Awaitable[T]) -> Mapping[AgentID, T]:
        return self._noted(await result)

    def _noted(self, result: T) -> Mapping[AgentID, T]:
        self._over = isinstance(result, StepOutcome) and bool(result.terminated or result.truncated)
        return {self.agent_id: result}
