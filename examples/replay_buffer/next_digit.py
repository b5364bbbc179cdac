"""Ten questions with one right digit each."""

from random import Random

import ludic
from ludic.types import Info, Obs


class NextDigit(ludic.SingleAgentEnv):
    """Say which digit comes next; 1 for the right one."""

    blocking = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self.digit = Random(seed).randrange(10)
        return self.env_current_obs(), {}

    def env_current_obs(self) -> Obs:
        return f"Next after {self.digit}"

    def env_step(self, action: str) -> ludic.StepOutcome:
        right = action.strip() == str((self.digit + 1) % 10)
        info = {"result": "right" if right else "wrong"}
        return ludic.StepOutcome("", float(right), terminated=True, info=info)


def sloppy(obs: str, rng: Random) -> str:
    """A teacher that is right half of the time, and says any digit otherwise."""
    right = (int(obs[-1]) + 1) % 10
    return str(right if rng.random() < 0.5 else rng.randrange(10))
