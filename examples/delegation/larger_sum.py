"""The larger of two sums: a parent has an adder do each, and picks.

The run files in this folder name the environment and the teacher:
`ludic train examples/delegation/tiny.toml`.
"""

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

from ludic.envs import SingleAgentEnv
from ludic.types import Info, Obs, StepOutcome


class LargerSum(SingleAgentEnv):
    """Asks for the larger of two different sums, of numbers from `low` to `high`."""

    blocking = False  # it answers at once

    def __init__(self, *, low: int = 1, high: int = 4) -> None:
        self._low, self._high = low, high
        self._sums: list[tuple[int, int]] = []

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        rng = Random(seed)
        self._sums = []
        while len({sum(pair) for pair in self._sums}) < 2:
            self._sums = [
                (rng.randint(self._low, self._high), rng.randint(self._low, self._high))
                for _ in range(2)
            ]
        return self.env_current_obs(), {}

    def env_step(self, action: str) -> StepOutcome:
        right = action.strip() == str(max(map(sum, self._sums)))
        info = {"result": "right" if right else "wrong"}
        return StepOutcome("", float(right), terminated=True, info=info)

    def env_current_obs(self) -> Obs:
        return " or ".join(f"{a} + {b}" for a, b in self._sums)


def teacher(obs: str, rng: Random, history: Sequence[dict[str, Any]]) -> str:
    """Plays parent and adder, whichever is asked. The adder is off by one now and then; the parent
    hands out both sums, and takes either answer."""
    tasks = re.findall(r"\d+ \+ \d+", obs)
    if len(tasks) == 2:
        calls = [{"name": "adder", "arguments": {"task": task}} for task in tasks]
        return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    if tasks:
        answer = sum(map(int, tasks[0].split(" + "))) + rng.choice((0, 0, 0, 1))
    else:
        heard = [obs, *(m["content"] for m in history if m["role"] == "tool")]
        answer = int(rng.choice(heard).split()[0])
    return f"<answer>{answer}</answer>"
