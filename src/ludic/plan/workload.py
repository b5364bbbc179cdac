"""What is simulated: the episodes of an update, with drawn lengths and environment times, and the
seconds of a machine; and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
        z = np.random.default_rng(0).standard_normal(_GRID)  # the same every time
        low, high = np.log(self.mean) - 4 * self.spread**2 - 1, np.log(self.most) + 8 * self.spread
        for _ in range(50):
            middle = (low + high) / 2
            mean = np.clip(np.exp(middle + self.spread * z), 1, self.most).mean()
            low, high = (middle, high) if mean < self.mean else (low, middle)
        return float((low + high) / 2)


@dataclass(frozen=True, slots=True)
class Workload:
    """An update's episodes, in groups that share their prompt, and how many updates there are.
    `env_s` is the mean time of an environment's step, which is drawn from an exponential
    distribution, and `host_s` what an episode's environment computes, one episode at a time in each
    process."""

    episodes: int
    group: int
    lengths: Lengths
    updates: int
    prompt: int = 128
    turns: int = 1
    observation: int = 64
    env_s: float = 0.0
    host_s: float = 0.0
    trained: float = 1.0
    """The share of tokens that passes compute: groups of equal rewards teach nothing."""

    def __post_init__(self) -> None:
        if self.episodes % self.group:
            raise ConfigError(
                f"{self.episodes} episodes do not make whole groups of {self.group}: set "
                "training.rollouts_per_update to a multiple of the algorithm's group_size"
            )

    @property
    def context(self) -> float:
        """The tokens of an episode at its end, on average."""
        sampled = self.turns * self.lengths.mean
        return self.prompt + sampled + (self.turns - 1) * self.observation

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
        if self.env_s == 0:
            return [0.0] * count
        return [float(s) for s in rng.exponential(self.env_s, count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated, in seconds. `lag` is how many updates old a sample may be: 0 samples and
    trains in turns; with `ahead`, a batch is begun only once the one before it is trained on.
    `shared`: sampler and trainer have one device, which does one thing at a time. `in_process`: the
    hosts are the sampler's own processes, whose interpreters do one thing at a time: while an
    episode is begun or read, the next decode step waits."""

    workload: Workload
    servers: int
    slots: int
    step_s: Sequence[float]
    """A step's time by its rows, from none to `slots`, without what the cache adds."""
    cached_s: float
    prompt_s: float
    """For each token of a prompt that is not in a cache."""
    request_s: float = 0.0
    """For each request, on the server's host."""
    train_s: Callable[[float, float], float]
    """Of an update's tokens and its longest sample."""
    hosts: int = 1
    own_episode_s: float = 0.0
    """Of each episode, what one process does for all hosts."""
    host_episode_s: float = 0.0
    host_turn_s: float = 0.0
    host_token_s: float = 0.0
    intake_episode_s: float = 0.0
    intake_token_s: float = 0.0
    publish_s: float = 0.0
    """How long the trainer waits for a publish."""
    arrives_s: float = 0.0
    """How long after that servers have the new weights."""
    pause_s: float = 0.0
    other_s: float = 0.0
    """What else the trainer does in every update."""
    lag: int = 0
    ahead: bool = False
    in_order: bool = True
    shared: bool = False
    in_process: bool = False
    checkpoint_every: int = 0
    checkpoint_s: float = 0.0
    server_failures_per_hour: float = 0.0
    trainer_failures_per_hour: float = 0.0
    restart_s: float = 120.0
    seed: int = 0


@dataclass(slots=True)
class Result:
    """What came out. Seconds of an update are means over those after the first `1 + lag`."""

    update_s: float = 0.0
    wait_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    sampled: int = 0
    trained: int = 0
    unused: int = 0
    lost: int = 0
    lag_mean: float = 0.0
    lag_max: int = 0
    longest: float = 0.0
    """The tokens of an update's longest episode."""
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    failures: int = 0
    trace: list[tuple[float, float, str]] = field(default_factory=list)
    """For each event: when it was caused, when it happened, and what it was."""
