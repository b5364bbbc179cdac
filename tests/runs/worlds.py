"""Environments in a module without torch: a process that only plays them starts sooner."""

from __future__ import annotations

from typing import Any

from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class Letters(SingleAgentEnv):
    """Say A."""

    blocking = False

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.env_current_obs(), {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", float(action.strip() == "A"), terminated=True)

    def env_current_obs(self) -> str:
        return "A or B?"


class Long(SingleAgentEnv):
    """Ten steps; every answer has its worth."""

    blocking = False

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.taken = 0
        return "Go.", {}

    def env_step(self, action: str) -> StepOutcome:
        self.taken += 1
        worth = (sum(map(ord, action)) % 7) / 7
        return StepOutcome("Go.", worth, terminated=self.taken == 10)

    def env_current_obs(self) -> str:
        return "Go."
