"""Small environments for the tests of protocols: good ones, and ones that break their contract."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.types import StepOutcome


class Countdown(SingleAgentEnv):
    """Takes `steps` actions, each worth its number; the last one ends it."""

    blocking: ClassVar[bool] = False

    def __init__(self, steps: int = 2, *, ends: str = "terminated") -> None:
        self.steps, self.ends = steps, ends
        self.left = 0
        self.actions: list[str] = []
        self.seeds: list[int | None] = []
        self.closed = 0

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
        self.left = self.steps
        self.actions = []
        self.seeds.append(seed)
        return f"{self.left} left", {"seed": seed}

    def env_step(self, action: str) -> StepOutcome:
        self.actions.append(action)
        self.left -= 1
        over = self.left == 0
        return StepOutcome(
            f"{self.left} left",
            float(len(self.actions)),
            terminated=over and self.ends == "terminated",
            truncated=over and self.ends == "truncated",
            info={"left": self.left},
        )

    def env_current_obs(self) -> str:
        return f"{self.left} left"

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return "Count down."

    def task_key(self) -> str | None:
        return f"countdown-{self.steps}"

    def close(self) -> None:
        self.closed += 1


class HangingEnv(Countdown):
    """Never answers to a step."""

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        await asyncio.sleep(3600)
        raise AssertionError


class RaisingEnv(Countdown):
    """Raises in the n-th step; n = 0 is the reset."""

    def __init__(self, at: int) -> None:
        super().__init__(5)
        self.at = at

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
        if self.at == 0:
            raise RuntimeError("the dice are lost")
        return super().env_reset(seed=seed)

    def env_step(self, action: str) -> StepOutcome:
        if len(self.actions) + 1 == self.at:
            raise RuntimeError("the dice are lost")
        return super().env_step(action)


class AnsweringEnv(Countdown):
    """Answers to every step with what it was given, sound or not."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def step(self, actions: Mapping[str, str]) -> Any:
        return self.answer


class Endless(Countdown):
    """Says that its agent has ended, and goes on asking it to act (two agents, one leaves)."""

    @property
    def agent_ids(self) -> Sequence[str]:
        return ("agent", "other")

    @property
    def active_agents(self) -> Sequence[str]:
        return ("agent",)

    def reset(self, *, seed: int | None = None) -> Any:
        return {"agent": ("go", {}), "other": ("wait", {})}

    def step(self, actions: Mapping[str, str]) -> Any:
        return {"agent": StepOutcome("", 0.0, terminated=True)}


class Duel(LudicEnv[str, str, str]):
    """Both name a number at the same time; the higher one wins. `rounds` rounds."""

    blocking: ClassVar[bool] = False
    accepts_partial_actions: ClassVar[bool] = False

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = rounds
        self.played: list[dict[str, str]] = []

    @property
    def agent_ids(self) -> Sequence[str]:
        return ("left", "right")

    @property
    def active_agents(self) -> Sequence[str]:
        return () if len(self.played) == self.rounds else self.agent_ids

    def reset(self, *, seed: int | None = None) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
        self.played = []
        return {a: (f"You are {a}.", {}) for a in self.agent_ids}

    def step(self, actions: Mapping[str, str]) -> Mapping[str, StepOutcome]:
        self.played.append(dict(actions))
        over = len(self.played) == self.rounds
        best = max(actions.values())
        return {
            a: StepOutcome(
                f"played {sorted(actions)}",
                1.0 if actions.get(a) == best else -1.0,
                terminated=over,
                info={"round": len(self.played)},
            )
            for a in self.agent_ids
        }

    def current_obs(self) -> Mapping[str, str]:
        return dict.fromkeys(self.agent_ids, "")


class PartialDuel(Duel):
    """Goes on without the one whose answer could not be read."""

    accepts_partial_actions: ClassVar[bool] = True
