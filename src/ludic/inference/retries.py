"""How long to wait for an answer, and before asking a server again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ludic.errors import ConfigError, DeadlineError


@asynccontextmanager
async def within(
    seconds: float | None, what: str, whom: str | Callable[[], str]
) -> AsyncIterator[asyncio.Timeout]:
    """Raises `DeadlineError` when its body takes longer, which says what was waited for from whom.
    A deadline inside it keeps its own error."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield limit
    except TimeoutError as exc:
        if isinstance(exc, DeadlineError) or not limit.expired():
            raise
        whom = whom if isinstance(whom, str) else whom()
        raise DeadlineError(what, whom, seconds or 0.0) from exc


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `first_s` up to `longest_s`, each shortened by a random share of at
    most `jitter`, so that many clients do not come back at once."""

    first_s: float = 0.5
    longest_s: float = 20.0
    jitter: float = 0.5
    # A separate source: timing is not part of a run's seeds, and global state stays untouched.
    _random: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (0 <= self.first_s <= self.longest_s and 0 <= self.jitter <= 1):
            raise ConfigError(f"{self}: needs 0 <= first_s <= longest_s and jitter in [0, 1]")

    def pause_s(self, attempt: int, retry_after_s: float | None = None) -> float:
        """Seconds to wait after the failed attempt of that number; never less than the server
        asked for, nor more than `longest_s` unless it did."""
        pause = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 60))
        pause *= 1 - self.jitter * self._random.random()
        return max(pause, retry_after_s or 0.0)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds of a `Retry-After` header; None where there is none that counts seconds."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
