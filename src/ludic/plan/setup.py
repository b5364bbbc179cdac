"""What the simulation is given, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ludic.plan.workload import Workload


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
    servers_busy: float = 0.0
    rows_mean: float = 0.0
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    failures: int = 0
    events: int = 0
    trace: list[tuple[float, float, str]] = field(default_factory=list)
    """Of each event: when it was caused, when it happened, what it was."""
