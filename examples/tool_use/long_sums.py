"""Sums that are too long for mental arithmetic, and a teacher that sometimes uses a tool.

The run files in this folder name both: `ludic train examples/tool_use/tiny.toml`.
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from ludic.envs import SingleAgentEnv
from ludic.types import Info, Obs, StepOutcome


class LongSums(SingleAgentEnv):
    """Asks for the sum of `terms` numbers from `low` to `high`, and takes one answer."""

    blocking = False  # it answers at once

    def __init__(self, *, terms: int = 5, low: int = 100, high: int = 999) -> None:
        self._terms, self._low, self._high = terms, low, high
        self._numbers: list[int] = []

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        rng = Random(seed)
        self._numbers = [rng.randint(self._low, self._high) for _ in range(self._terms)]
        return self.env_current_obs(), {}

    def env_step(self, action: str) -> StepOutcome:
        right = action.strip() == str(sum(self._numbers))
        info = {"result": "right" if right else "wrong"}
        return StepOutcome("", float(right), terminated=True, info=info)

    def env_current_obs(self) -> Obs:
        return f"What is {' + '.join(map(str, self._numbers))}?"


def teacher(obs: str, rng: Random, history: Sequence[dict[str, Any]]) -> str:
    """Guesses in half of the episodes, and asks a tool in the others: mostly the calculator. It
    shows how to call tools; RL finds out that they pay."""
    if history[-1]["role"] == "assistant":  # so this is what the tool said
        return f"\\boxed{{{obs.split()[0]}}}"
    task = obs.removeprefix("What is ").removesuffix("?")
    numbers = [int(n) for n in task.split(" + ")]
    if rng.random() < 0.5:
        guess = sum(numbers) + rng.choice((-1, 1)) * rng.randint(1, max(numbers))
        return f"\\boxed{{{guess}}}"
    tool, argument = ("calculator", "expression") if rng.random() < 0.75 else ("python", "code")
    call = {"name": tool, "arguments": {argument: task}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
