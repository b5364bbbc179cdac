"""Two domains with one right number per question, and teachers for a cold start.

`Sums` asks "What is 3 + 4?", `Larger` asks "Which is larger, 3 or 4?".
"""

import re
from random import Random

import ludic
from ludic.types import Info, Obs


class Sums(ludic.SingleAgentEnv):
    """Add two numbers up to `largest`; 1 for the right sum."""

    blocking = False
    template = "What is {} + {}? Answer with the number only."

    def __init__(self, *, largest: int = 20, short: bool = False) -> None:
        super().__init__()
        self.largest = largest
        self.template = self.template.split("?")[0] + "?" if short else self.template

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        rng = Random(seed)
        self.numbers = rng.randint(0, self.largest), rng.randint(0, self.largest)
        return self.env_current_obs(), {}

    def env_current_obs(self) -> Obs:
        return self.template.format(*self.numbers)

    def env_step(self, action: str) -> ludic.StepOutcome:
        right = action.strip() == answer(self.env_current_obs())
        info = {"result": "right" if right else "wrong"}
        return ludic.StepOutcome("", float(right), terminated=True, info=info)


class Larger(Sums):
    """Name the larger of two numbers; 1 for the right one."""

    template = "Which is larger, {} or {}? Answer with the number only."


def answer(question: str) -> str:
    """The right answer to a question of either domain."""
    a, b = map(int, re.findall(r"\d+", question))
    return str(a + b if "+" in question else max(a, b))


def right_answer(obs: str, rng: Random) -> str:
    """A teacher that is always right."""
    return answer(obs)


def sloppy_answer(obs: str, rng: Random) -> str:
    """A teacher that is right half of the time, and says any number otherwise."""
    if rng.random() < 0.5:
        return answer(obs)
    a, b = map(int, re.findall(r"\d+", obs))
    return str(rng.randint(0, 2 * max(a, b, 4)))
