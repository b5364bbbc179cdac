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
class _State:
    role: Role
    due: float
    placement: Placement | None = None
    running_since: float | None = None
    waiting_since: float | None = None
    announced: bool = False
    failures: int = 0
    restarts: int = 0
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
        self._states: dict[str, _State] = {}

    def add(self, role: Role) -> None:
        """Has a role started with the next tick. Its name must be new."""
        if self.has(role.name):
            raise ValueError(f"there is a role called {role.name!r}")
        self._states[role.name] = _State(role, self._clock())

    def has(self, name: str) -> bool:
        """Whether there is such a role, or was one that is over for good."""
        return name in self._states

    def over(self, kind: str) -> int:
        """How many roles of a kind are over for good."""
        return sum(s.role.kind == kind and s.outcome is not None for s in self._states.values())

    def names(self, kind: str) -> list[str]:
        """The roles of a kind that are neither over nor leaving, in their order."""
        return [
            name
            for name, state in self._states.items()
            if state.role.kind == kind and state.outcome is None and state.leaves_by is None
        ]

    def running(self, kind: str) -> int:
        """How many roles of a kind run."""
        return sum(self._states[name].running_since is not None for name in self.names(kind))

    def outcome(self, name: str) -> Ended | None:
        """How a role ended for good; None while it has not."""
        return self._states[name].outcome

    def send(self, name: str, sign: signal.Signals) -> None:
        """Sends a signal to a role's first process, if it has one."""
        if (placement := self._states[name].placement) is not None:
            placement.send(sign)

    def remove(self, name: str) -> None:
        """Tells a role that is not wanted any more to leave; ticks see to the rest."""
        state = self._states[name]
        state.leaves_by = self._clock() + self._grace_s
        if state.placement is None:
            del self._states[name]
        else:
            state.placement.send(signal.SIGTERM)
        self._tell(Event(name, "removed", f"{name} is told to leave: there are enough"))

    def tick(self) -> None:
        """Looks at every role once."""
        for state in list(self._states.values()):
            if state.outcome is not None:
                continue
            if state.placement is None:
                if self._clock() >= state.due:
                    self._start(state)
                continue
            how = state.placement.poll()
            if state.leaves_by is not None:
                if isinstance(how, Ended) or self._clock() > state.leaves_by:
                    self._end(state)
                    del self._states[state.role.name]
                continue
            match how:
                case Waiting(why):
                    self._waits(state, why)
                case Running(nodes):
                    self._runs(state, nodes)
                case Ended() as ended:
                    self._ended(state, ended)

    def _start(self, state: _State) -> None:
        try:
            state.placement = self._engine.start(state.role)
        except LaunchError as exc:
            self._ended(state, Ended(None, str(exc)))

    def _waits(self, state: _State, why: str) -> None:
        name, now = state.role.name, self._clock()
        if state.waiting_since is None or not why:
            state.waiting_since = now
        waited = now - state.waiting_since
        if state.role.finishes and waited > self._patience_s:
            self._end(state)
            self._over(state, Ended(None, f"it had no place for {waited:.0f} s: {why}"))
        elif waited >= SAID_AFTER_S and not state.announced:
            state.announced = True
            until = f", for {self._patience_s:.0f} s at most" if state.role.finishes else ""
            self._tell(Event(name, "waiting", f"{name} waits for a place{until}: {why}"))

    def _runs(self, state: _State, nodes: tuple[str, ...]) -> None:
        if state.running_since is None:
            state.running_since, state.waiting_since = self._clock(), None
            state.announced = False
            name, where = state.role.name, ", ".join(dict.fromkeys(nodes))
            self._tell(Event(name, "placed", f"{name} runs on {where}", nodes, state.restarts))

    def _ended(self, state: _State, ended: Ended) -> None:
        role, now = state.role, self._clock()
        self._end(state)
        if (role.finishes and ended.status == 0) or not self._again(role):
            self._over(state, ended, well=True)
            return
        if state.running_since is not None and now - state.running_since > STEADY_S:
            state.failures = 0
        state.running_since, state.waiting_since = None, None
        if state.failures >= role.restarts:
            self._over(state, ended)
            return
        pause = min(FIRST_PAUSE_S * 2**state.failures, LONGEST_PAUSE_S)
        state.failures += 1
        state.restarts += 1
        state.due = now + pause
        sentence = f"{role.name} is started again in {pause:g} s. It {ended}"
        self._tell(Event(role.name, "restarted", sentence, (), state.restarts))

    def _over(self, state: _State, ended: Ended, *, well: bool = False) -> None:
        name, state.outcome, state.running_since = state.role.name, ended, None
        if well:
            self._tell(Event(name, "finished", f"{name} has finished", (), state.restarts))
            return
        after = f", after {state.restarts} restarts," if state.restarts else ""
        kind = state.role.kind
        remaining = len(self.names(kind))
        total = sum(s.role.kind == kind for s in self._states.values())
        counted = f"; {remaining} of {total} are left" if total > 1 else ""
        sentence = f"{name}{after} is NOT started again{counted}. It {ended}"
        self._tell(Event(name, "gone", sentence, (), state.restarts, is_last=not remaining))

    def _end(self, state: _State, grace_s: float = QUICK_S) -> None:
        placement, state.placement = state.placement, None
        if placement is not None:
            placement.end(grace_s)

    def close(self) -> None:
        """Ends every role, and the engine: first all are told, then each is waited for."""
        for state in self._states.values():
            if state.placement is not None:
                with suppress(Exception):
                    state.placement.send(signal.SIGTERM)
        deadline = self._clock() + self._grace_s
        for state in self._states.values():
            self._end(state, max(deadline - self._clock(), 1.0))
        self._engine.close()
