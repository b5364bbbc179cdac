"""Keeps roles running: starts them, starts them again, and says so."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ludic.errors import LaunchError
from ludic.launch.roles import Ended, Engine, Placement, Role, Running, Waiting

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Between a role's end and its next start: doubled each time."""
STEADY_S = 600.0
"""One that ran for this long is counted from the beginning again."""
SAID_AFTER_S = 5.0
"""So long without a place is said aloud."""
GRACE_S, QUICK_S = 60.0, 10.0
"""What a role gets to end in that is told to leave, and what the rest of a gang that failed."""

What = Literal["placed", "waiting", "restarted", "gone", "finished", "removed"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a role, as a sentence too."""

    role: str
    what: What
    sentence: str
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    is_last: bool = False
    """Whether none of its kind is left."""

    @property
    def is_bad(self) -> bool:
        return self.what in ("waiting", "restarted", "gone")


@dataclass(slots=True)
class _Kept:
    role: Role
    due: float
    placement: Placement | None = None
    running_since: float | None = None
    waiting_since: float | None = None
    told: bool = False
    failures: int = 0
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    leaves_by: float | None = None
    """Told to leave, and ended by force then."""
    outcome: Ended | None = None
    """How it ended for good."""


class Supervisor:
    """Watches over roles on an engine. Whoever owns it calls `tick` every half second or so, from
    one thread at a time.

    A role that ends is started again after a pause that grows, `restarts` times, and then counts as
    gone. One that has no place waits for one: up to `patience_s` if it finishes (the run needs it),
    and else for as long as there is a run, which goes on with fewer. `again` is asked whether one
    that ended is still wanted.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tell: Callable[[Event], None],
        patience_s: float = 600.0,
        grace_s: float = GRACE_S,
        again: Callable[[Role], bool] = lambda role: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._tell, self._clock = engine, tell, clock
        self._patience_s, self._grace_s, self._again = patience_s, grace_s, again
        self._kept: dict[str, _Kept] = {}

    def add(self, role: Role) -> None:
        """Has a role started with the next tick. Its name must be new."""
        if self.has(role.name):
            raise ValueError(f"there is a role called {role.name!r}")
        self._kept[role.name] = _Kept(role, self._clock())

    def has(self, name: str) -> bool:
        """Whether there is such a role, or was one that is over for good."""
        return name in self._kept

    def over(self, kind: str) -> int:
        """How many roles of a kind are over for good."""
        return sum(k.role.kind == kind and k.outcome is not None for k in self._kept.values())

    def names(self, kind: str) -> list[str]:
        """The roles of a kind that are neither over nor leaving, in their order."""
        return [
            name
            for name, kept in self._kept.items()
            if kept.role.kind == kind and kept.outcome is None and kept.leaves_by is None
        ]

    def running(self, kind: str) -> int:
        """How many roles of a kind run."""
        return sum(self._kept[name].running_since is not None for name in self.names(kind))

    def outcome(self, name: str) -> Ended | None:
        """How a role ended for good; None while it has not."""
        return self._kept[name].outcome

    def send(self, name: str, sign: signal.Signals) -> None:
        """Sends a signal to a role's first process, if it has one."""
        if (placement := self._kept[name].placement) is not None:
            placement.send(sign)

    def remove(self, name: str) -> None:
        """Tells a role that is not wanted any more to leave; ticks see to the rest."""
        kept = self._kept[name]
        kept.leaves_by = self._clock() + self._grace_s
        if kept.placement is None:
            del self._kept[name]
        else:
            kept.placement.send(signal.SIGTERM)
        self._tell(Event(name, "removed", f"{name} is told to leave: there are enough"))

    def tick(self) -> None:
        """Looks at every role once."""
        for kept in list(self._kept.values()):
            if kept.outcome is not None:
                continue
            if kept.placement is None:
                if self._clock() >= kept.due:
                    self._start(kept)
                continue
            how = kept.placement.poll()
            if kept.leaves_by is not None:
                if isinstance(how, Ended) or self._clock() > kept.leaves_by:
                    self._end(kept)
                    del self._kept[kept.role.name]
                continue
            match how:
                case Waiting(why):
                    self._waits(kept, why)
                case Running(nodes):
                    self._runs(kept, nodes)
                case Ended() as ended:
                    self._ended(kept, ended)

    def _start(self, kept: _Kept) -> None:
        try:
            kept.placement = self._engine.start(kept.role)
        except LaunchError as exc:
            self._ended(kept, Ended(None, str(exc)))

    def _waits(self, kept: _Kept, why: str) -> None:
        name, now = kept.role.name, self._clock()
        if kept.waiting_since is None or not why:
            kept.waiting_since = now
        waited = now - kept.waiting_since
        if kept.role.finishes and waited > self._patience_s:
            self._end(kept)
            self._over(kept, Ended(None, f"it had no place for {waited:.0f} s: {why}"))
        elif waited >= SAID_AFTER_S and not kept.told:
            kept.told = True
            until = f", for {self._patience_s:.0f} s at most" if kept.role.finishes else ""
            self._tell(Event(name, "waiting", f"{name} waits for a place{until}: {why}"))

    def _runs(self, kept: _Kept, nodes: tuple[str, ...]) -> None:
        if kept.running_since is None:
            kept.running_since, kept.waiting_since, kept.told = self._clock(), None, False
            kept.nodes, name = nodes, kept.role.name
            where = ", ".join(dict.fromkeys(nodes))
            sentence = f"{name} runs on {where}"
            self._tell(Event(name, "placed", sentence, nodes, kept.restarts))

    def _ended(self, kept: _Kept, ended: Ended) -> None:
        role, now = kept.role, self._clock()
        self._end(kept)
        if (role.finishes and ended.status == 0) or not self._again(role):
            self._over(kept, ended, well=True)
            return
        if kept.running_since is not None and now - kept.running_since > STEADY_S:
            kept.failures = 0
        kept.running_since, kept.waiting_since = None, None
        if kept.failures >= role.restarts:
            self._over(kept, ended)
            return
        pause = min(FIRST_PAUSE_S * 2**kept.failures, LONGEST_PAUSE_S)
        kept.failures, kept.restarts, kept.due = kept.failures + 1, kept.restarts + 1, now + pause
        sentence = f"{role.name} is started again in {pause:g} s. It {ended}"
        self._tell(Event(role.name, "restarted", sentence, (), kept.restarts))

    def _over(self, kept: _Kept, ended: Ended, *, well: bool = False) -> None:
        name, kept.outcome, kept.running_since = kept.role.name, ended, None
        if well:
            self._tell(Event(name, "finished", f"{name} has finished", (), kept.restarts))
            return
        after = f", after {kept.restarts} restarts," if kept.restarts else ""
        kind = kept.role.kind
        left, were = len(self.names(kind)), sum(k.role.kind == kind for k in self._kept.values())
        counted = f"; {left} of {were} are left" if were > 1 else ""
        sentence = f"{name}{after} is NOT started again{counted}. It {ended}"
        self._tell(Event(name, "gone", sentence, (), kept.restarts, is_last=not left))

    def _end(self, kept: _Kept, grace_s: float = QUICK_S) -> None:
        placement, kept.placement = kept.placement, None
        if placement is not None:
            placement.end(grace_s)

    def close(self) -> None:
        """Ends every role, and the engine: first all are told, then each is waited for."""
        for kept in self._kept.values():
            if kept.placement is not None:
                with suppress(Exception):
                    kept.placement.send(signal.SIGTERM)
        deadline = self._clock() + self._grace_s
        for kept in self._kept.values():
            self._end(kept, max(deadline - self._clock(), 1.0))
        self._engine.close()
