"""Two digits, one of them larger: a task to try a new algorithm on."""

import re
from random import Random

import ludic
from ludic.types import Info, Obs


class LargerDigit(ludic.SingleAgentEnv):
    """Name the larger digit; 1 for the right one."""

    blocking = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self.digits = Random(seed).sample(range(10), 2)
        return self.env_current_obs(), {}

    def env_current_obs(self) -> Obs:
        return "Name the larger digit: {} or {}".format(*self.digits)

    def env_step(self, action: str) -> ludic.StepOutcome:
        right = action.strip() == str(max(self.digits))
        info = {"result": "right" if right else "wrong"}
        return ludic.StepOutcome("", float(right), terminated=True, info=info)


def either(obs: str, rng: Random) -> str:
    """A teacher that shows the format of an answer: one of the two digits."""
    return str(rng.choice(re.findall(r"\d", obs)))
