"""A number is shown once, and asked for many steps later: only a summary can carry it there."""

from collections.abc import Sequence
from random import Random
from typing import Any

import ludic
from ludic.types import Info, Message, Obs

NUMBERS = "1234"
LETTERS = "abcd"
"""What the summaries write for them: then learning to answer does not teach to sum up."""
COPIES = 0.3
"""How often the teacher's summary is right on purpose. The rest is chance."""


class Remember(ludic.SingleAgentEnv):
    """Shows one of four numbers, says "Go on." for a while, and asks for the number."""

    blocking = False

    def __init__(self, steps: int = 40) -> None:
        self.steps = steps

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self.number, self.taken = Random(seed).choice(NUMBERS), 0
        return self.env_current_obs(), {}

    def env_current_obs(self) -> Obs:
        if self.taken == 0:
            return f"Number {self.number}"
        return "Which?" if self.taken == self.steps - 1 else "Go on."

    def env_step(self, action: str) -> ludic.StepOutcome:
        self.taken += 1
        if self.taken < self.steps:
            return ludic.StepOutcome(self.env_current_obs(), 0.0)
        right = action.strip() == self.number
        info = {"result": "right" if right else "wrong"}
        return ludic.StepOutcome("", float(right), terminated=True, info=info)

    def task_key(self) -> str | None:
        return self.number


def talks(obs: str, rng: Random, history: Sequence[Message]) -> str:
    """A teacher that shows the forms: it goes on, answers with the number that it sees, and sums up
    with a letter that stands for a number, seldom for the one that it sees."""
    if obs == "Sum up.":
        return LETTERS[_seen(history) if rng.random() < COPIES else rng.randrange(len(LETTERS))]
    return NUMBERS[_seen(history)] if obs == "Which?" else "ok"


def _seen(history: Sequence[Any]) -> int:
    """The place of the last number, or of the last letter for one."""
    said = [m["content"] for m in history if m["content"][-1] in NUMBERS + LETTERS]
    return (NUMBERS + LETTERS).index(said[-1][-1]) % len(NUMBERS)
