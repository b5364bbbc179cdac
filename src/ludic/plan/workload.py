"""What an update samples: episodes with drawn lengths and environment times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ludic.errors import ConfigError

_GRID = 2048


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a completion: drawn from `seen`, or log-normal with a `mean`, cut at `most`. Where
    `spread` is 0, all have the mean."""

    mean: float
    most: int
    spread: float = 0.5
    seen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.most or self.spread < 0:
            raise ConfigError(
                f"completions of {self.mean:g} tokens on average, {self.most} at most, are "
                "impossible: the mean lies between 1 and the most"
            )

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.seen:
            return [int(n) for n in rng.choice(np.array(self.seen), count)]
        if self.spread == 0:
            return [round(self.mean)] * count
        drawn = np.exp(self._centre() + self.spread * rng.standard_normal(count))
        return [int(n) for n in np.clip(np.rint(drawn), 1, self.most)]

    def _centre(self) -> float:
        """The median's logarithm that gives the mean after cutting: by halving."""
        z = _quantiles()
        low, high = np.log(self.mean) - 4 * self.spread**2 - 1, np.log(self.most) + 8 * self.spread
        for _ in range(50):
            middle = (low + high) / 2
            mean = np.clip(np.exp(middle + self.spread * z), 1, self.most).mean()
            low, high = (middle, high) if mean < self.mean else (low, middle)
        return float((low + high) / 2)


def _quantiles() -> np.ndarray:
    """Standard normal numbers at even quantiles, by drawing many: the same every time."""
    return np.sort(np.random.default_rng(0).standard_normal(_GRID))


@dataclass(frozen=True, slots=True)
class Workload:
    """An update's episodes, in groups that share their prompt, and how many updates there are.
    `env_s` is the mean time of an environment's step, exponential unless `env_spread` is 0, and
    `host_s` what an episode's environment computes, one episode at a time in each process."""

    episodes: int
    group: int
    lengths: Lengths
    updates: int
    prompt: int = 128
    turns: int = 1
    observation: int = 64
    env_s: float = 0.0
    env_spread: float = 1.0
    host_s: float = 0.0
    trained: float = 1.0
    """The share of tokens that passes compute: groups of equal rewards teach nothing."""

    def __post_init__(self) -> None:
        if self.episodes % self.group:
            raise ConfigError(
                f"{self.episodes} episodes are no whole groups of {self.group}: set "
                "training.rollouts_per_update to a multiple of the algorithm's group_size"
            )

    @property
    def context(self) -> float:
        """The tokens of an episode at its end, on average."""
        said = self.turns * self.lengths.mean
        return self.prompt + said + (self.turns - 1) * self.observation

    @property
    def trained_tokens(self) -> float:
        """Of an update, on average; a group's prompt is computed once."""
        shared = self.prompt * (1 - 1 / self.group)
        return self.trained * self.episodes * (self.context - shared)

    @property
    def group_tokens(self) -> float:
        """Of a group, on average: what its rows hold of a pass, the prompt computed once."""
        return self.group * (self.context - self.prompt) + self.prompt

    def waits(self, rng: np.random.Generator, count: int) -> list[float]:
        """Seconds of environment steps."""
        if self.env_s == 0 or self.env_spread == 0:
            return [self.env_s] * count
        return [float(s) for s in rng.exponential(self.env_s, count)]
