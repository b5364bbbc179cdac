"""Teachers for the cold starts of these runs: they know the rules, but not how to win."""

from __future__ import annotations

import re
from random import Random


def any_direction(obs: str, rng: Random) -> str:
    """A step on the frozen lake, in any direction."""
    return rng.choice(("left", "down", "right", "up"))


def any_number(obs: str, rng: Random) -> str:
    """A number from 1 to 20, in the game's format."""
    return f"[{rng.randint(1, 20)}]"


def nearly(obs: str, rng: Random) -> str:
    """The right sum, or one that is off by one."""
    numbers = re.findall(r"[+-]? ?\d+", obs.rpartition(":")[2])
    return str(sum(int(number.replace(" ", "")) for number in numbers) + rng.choice((-1, 0, 1)))
