"""The task of the loop's benchmark: sums of one and two digits, one a turn."""

from __future__ import annotations

from random import Random

from ludic.envs import SingleAgentEnv
from ludic.types import Info, Obs, StepOutcome


class Sums(SingleAgentEnv):
    """`turns` sums, each to be answered with the number only; the reward is the share of right
    answers."""

    blocking = False

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._draw = Random(seed)
        self._left = self.turns
        self._next_sum()
        return self.env_current_obs(), {}

    def env_step(self, action: str) -> StepOutcome:
        right = action.strip().rstrip(".") == str(self._a + self._b)
        self._left -= 1
        if self._left:
            self._next_sum()
        return StepOutcome(
            obs=self.env_current_obs() if self._left else "",
            reward=right / self.turns,
            terminated=not self._left,
            info={"result": "right" if right else "wrong"},
        )

    def env_current_obs(self) -> Obs:
        return f"What is {self._a} + {self._b}? Answer with the number only."

    def _next_sum(self) -> None:
        top = 9 if self._draw.random() < 0.5 else 99
        self._a, self._b = self._draw.randint(1, top), self._draw.randint(1, top)


class BlockingSums(Sums):
    """The same in worker threads, as environments are played unless they say otherwise."""

    blocking = True
