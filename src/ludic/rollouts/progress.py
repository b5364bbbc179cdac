"""A call's progress, its budget, and the failure rate at which it stops."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ludic.errors import ConfigError, RolloutError
from ludic.rollouts.requests import PlannedEpisode


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a call of the engine stands, in episodes. `failed` counts failed attempts by cause,
    retried ones included; `not_started` those that the budget left no room for."""

    total: int
    finished: int = 0
    tokens: int = 0
    not_started: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)


ProgressCallback: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that may be spent. An episode or group that has begun is finished; when the next
    would have no room left, neither it nor any after it is started. `max_tokens` counts sampled
    tokens of finished episodes, so those in flight at that moment come on top."""

    max_tokens: int | None = None
    max_episodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_episodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Budget.{name}={value}: must be at least 1, or None")


class BudgetGate:
    """Decides, episode by episode in the order of the plan, whether it may begin."""

    def __init__(self, budget: Budget | None, episodes: Iterable[PlannedEpisode]) -> None:
        self._budget = budget or Budget()
        self._group_sizes = Counter(e.group_id for e in episodes if e.group_id is not None)
        self._begun: set[str] = set()
        self._reserved = 0
        self.closed = False
        self.admitted = 0
        self.tokens = 0

    def admits(self, episode: PlannedEpisode) -> bool:
        """Whether `episode` may begin; admitting the first of a group admits the whole group."""
        group = episode.group_id
        if group is not None and group in self._begun:
            self.admitted += 1
            return True
        size = self._group_sizes[group] if group is not None else 1
        limits = self._budget
        if (limits.max_tokens is not None and self.tokens >= limits.max_tokens) or (
            limits.max_episodes is not None and self._reserved + size > limits.max_episodes
        ):
            self.closed = True
        if self.closed:
            return False
        self._reserved += size
        self.admitted += 1
        if group is not None:
            self._begun.add(group)
        return True


MOST_TRACEBACKS = 32


class FailureMonitor:
    """Raises when too many of the last episodes failed.

    The rate is over the last `window` attempts; until there are `MIN_ATTEMPTS`, it is taken as
    if there were that many, so that one failure in a small batch does not end a run.
    """

    MIN_ATTEMPTS = 8

    def __init__(self, max_rate: float, window: int = 256) -> None:
        if not 0 <= max_rate <= 1:
            raise ConfigError(f"max_failure_rate={max_rate}: must be between 0 and 1")
        self.max_rate = max_rate
        self._causes: deque[str | None] = deque(maxlen=window)
        self._tracebacks: dict[str, str] = {}

    def record(self, cause: str | None, trace: str | None = None) -> None:
        """Notes one attempt, by the cause of its failure or None. The error has the traceback of
        the most frequent cause as a note, which Python prints with it."""
        self._causes.append(cause)
        if cause is None:
            return
        if trace is not None and len(self._tracebacks) < MOST_TRACEBACKS:
            self._tracebacks.setdefault(cause, trace)
        failures = Counter(c for c in self._causes if c is not None)
        attempts = max(len(self._causes), self.MIN_ATTEMPTS)
        if failures.total() > self.max_rate * attempts:
            shown = "\n".join(f"  {n} x {c}" for c, n in failures.most_common(5))
            error = RolloutError(
                f"{failures.total()} of the last {len(self._causes)} episodes failed, over "
                f"max_failure_rate={self.max_rate}:\n{shown}"
            )
            if note := self._tracebacks.get(failures.most_common(1)[0][0]):
                error.add_note(note)
            raise error
