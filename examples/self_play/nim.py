"""Nim for two: take one to three stones in turn; whoever takes the last one wins.

The first player can win by leaving a multiple of four, unless the game starts with one.
`tiny.toml` trains one policy on both seats and measures it against `Perfect`, which it never meets
in training.
"""

from collections.abc import Mapping, Sequence
from random import Random

from ludic.envs import LudicEnv
from ludic.types import Info, Obs, StepOutcome

SEATS = ("first", "second")


def shown(stones: int) -> Obs:
    return f"Stones: {stones}"


def legal(stones: int) -> list[int]:
    return [n for n in (1, 2, 3) if n <= stones]


class Nim(LudicEnv[str, Obs, str]):
    """Starts with `low` to `high` stones; with `winnable`, never with a multiple of four. Both
    hear the end: +1 and −1. Who takes what cannot be taken loses."""

    blocking = False  # it answers at once

    def __init__(self, *, low: int = 4, high: int = 15, winnable: bool = False) -> None:
        self._openings = [n for n in range(low, high + 1) if n % 4 or not winnable]
        self._stones, self._mover = 0, 0

    @property
    def agent_ids(self) -> Sequence[str]:
        return SEATS

    @property
    def active_agents(self) -> Sequence[str]:
        return (SEATS[self._mover],) if self._stones else ()

    def reset(self, *, seed: int | None = None) -> Mapping[str, tuple[Obs, Info]]:
        self._stones, self._mover = Random(seed).choice(self._openings), 0
        return {"first": (shown(self._stones), {})}

    def step(self, actions: Mapping[str, str]) -> Mapping[str, StepOutcome]:
        mover, waiting = SEATS[self._mover], SEATS[1 - self._mover]
        taken = actions[mover].strip()
        if taken not in map(str, legal(self._stones)):
            self._stones = 0
            return {mover: ended("illegal", -1.0), waiting: ended("win", 1.0)}
        self._stones -= int(taken)
        if not self._stones:
            return {mover: ended("win", 1.0), waiting: ended("loss", -1.0)}
        self._mover = 1 - self._mover
        return {mover: StepOutcome("", 0.0), waiting: StepOutcome(shown(self._stones), 0.0)}

    def current_obs(self) -> Mapping[str, Obs]:
        return dict.fromkeys(SEATS, shown(self._stones))


def ended(result: str, reward: float) -> StepOutcome:
    return StepOutcome("", reward, terminated=True, info={"result": result})


class Perfect:
    """A bot that wins whenever it can, and otherwise takes one stone."""

    def reset(self, *, seed: int | None) -> None:
        return None

    def act(self, obs: Obs) -> str:
        return str(int(obs.split()[-1]) % 4 or 1)


def teacher(obs: str, rng: Random) -> str:
    """Any legal number of stones: it knows the rules, but not how to win."""
    return str(rng.choice(legal(int(obs.split()[-1]))))
