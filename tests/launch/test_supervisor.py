"""The supervisor, over an engine whose roles do as they are told."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from ludic.errors import LaunchError
from ludic.launch import Ended, Event, Placement, Role, Running, Supervisor, Waiting
from ludic.launch.supervisor import LONGEST_PAUSE_S, STEADY_S

State = Waiting | Running | Ended
RUNS, CRASHES, LEAVES = Running(("here",)), Ended(1, "oh no"), Ended(0, "bye")


@dataclass
class Scripted:
    """A placement that reports the next of its states, and the last for ever."""

    states: list[State]
    signals: list[signal.Signals] = field(default_factory=list)
    ended: bool = False

    def poll(self) -> State:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def send(self, sign: signal.Signals) -> None:
        self.signals.append(sign)

    def end(self, grace_s: float) -> None:
        self.ended = True


class ScriptedEngine:
    """Starts roles with the states that were planned for each start."""

    gpus = 0.0

    def __init__(self, *starts: Sequence[State]) -> None:
        self.starts = list(starts)
        self.placements: list[Scripted] = []
        self.closed = False

    def start(self, role: Role) -> Placement:
        if not self.starts:
            raise LaunchError("no more processes")
        self.placements.append(Scripted(list(self.starts.pop(0))))
        return self.placements[-1]

    def shortage(self, roles: list[Role]) -> str | None:
        return None

    def close(self) -> None:
        self.closed = True


class Watched:
    """A supervisor of one role, a clock that is set by hand, and what was told."""

    def __init__(self, engine: ScriptedEngine, *, wanted: bool = True, **options: object) -> None:
        self.now, self.events = 0.0, list[Event]()
        self.engine = engine
        self.supervisor = Supervisor(
            engine,
            tell=self.events.append,
            patience_s=100.0,
            again=lambda role: wanted,
            clock=lambda: self.now,
        )
        name, log = "actor-1", Path("unused.log")
        self.supervisor.add(Role(name, ("true",), log, kind="actor", **options))  # type: ignore[arg-type]

    def tick(self, seconds: float = 0.0, times: int = 1) -> None:
        for _ in range(times):
            self.now += seconds
            self.supervisor.tick()

    @property
    def told(self) -> list[str]:
        return [event.what for event in self.events]


def test_a_role_that_ends_is_started_again_after_a_pause_that_doubles() -> None:
    crashes: list[list[State]] = [[RUNS, CRASHES] for _ in range(4)]
    watched = Watched(ScriptedEngine(*crashes), restarts=3)
    starts = []
    while watched.supervisor.names("actor"):
        before = len(watched.engine.placements)
        watched.tick(0.25)
        if len(watched.engine.placements) > before:
            starts.append(watched.now)
    pauses = [b - a for a, b in pairwise(starts)]
    assert [later - pauses[0] for later in pauses] == [0.0, 0.5, 1.5], "0.5, 1 and 2 s"
    assert watched.told == ["placed", "restarted"] * 3 + ["placed", "gone"]
    assert watched.events[-1].is_last
    assert "after 3 restarts, is NOT started again" in watched.events[-1].sentence
    assert "oh no" in watched.events[-1].sentence
    assert all(placement.ended for placement in watched.engine.placements)
    assert watched.supervisor.outcome("actor-1") == CRASHES


def test_the_pause_has_a_limit() -> None:
    watched = Watched(ScriptedEngine(*([CRASHES] for _ in range(20))), restarts=19)
    watched.tick(LONGEST_PAUSE_S, times=45)
    assert watched.events[-1].what == "gone"
    assert watched.events[-1].restarts == 19


def test_a_role_that_ran_for_long_is_counted_from_the_beginning_again() -> None:
    watched = Watched(
        ScriptedEngine([RUNS, RUNS, CRASHES], [RUNS, RUNS, CRASHES], [RUNS]), restarts=1
    )
    watched.tick(STEADY_S + 1.0, times=10)
    assert watched.told == ["placed", "restarted", "placed", "restarted", "placed"]


def test_a_role_without_a_place_is_said_aloud_once_and_goes_on_waiting() -> None:
    watched = Watched(ScriptedEngine([Waiting("no room")] * 50 + [RUNS]))
    watched.tick(10.0, times=30)
    assert watched.told == ["waiting"]
    assert watched.events[0].sentence == "actor-1 waits for a place: no room"
    watched.tick(10.0, times=30)
    assert watched.told == ["waiting", "placed"]


def test_what_the_run_needs_waits_until_a_deadline() -> None:
    watched = Watched(ScriptedEngine([Waiting("no room")]), finishes=True)
    watched.tick(10.0, times=20)
    assert watched.told == ["waiting", "gone"]
    assert "for 100 s at most" in watched.events[0].sentence
    assert "it had no place for" in watched.events[1].sentence
    assert watched.engine.placements[0].ended


def test_being_started_is_not_waiting_for_a_place() -> None:
    watched = Watched(ScriptedEngine([Waiting()]), finishes=True)
    watched.tick(10.0, times=50)
    assert watched.told == []


def test_a_role_that_finishes_is_over_with_status_0_and_any_other_comes_back() -> None:
    finishing = Watched(ScriptedEngine([RUNS, LEAVES]), finishes=True)
    finishing.tick(1.0, times=4)
    assert finishing.told == ["placed", "finished"]
    assert finishing.supervisor.outcome("actor-1") == LEAVES
    other = Watched(ScriptedEngine([RUNS, LEAVES], [RUNS]))
    other.tick(1.0, times=5)
    assert other.told == ["placed", "restarted", "placed"]


def test_a_role_that_is_not_wanted_any_more_is_not_started_again() -> None:
    watched = Watched(ScriptedEngine([RUNS, LEAVES]), wanted=False)
    watched.tick(1.0, times=5)
    assert watched.told == ["placed", "finished"]
    assert watched.supervisor.names("actor") == []


def test_one_that_is_told_to_leave_has_time_and_is_ended_by_force_then() -> None:
    watched = Watched(ScriptedEngine([RUNS]))
    watched.tick(1.0, times=2)
    watched.supervisor.remove("actor-1")
    placement = watched.engine.placements[0]
    assert placement.signals == [signal.SIGTERM]
    assert watched.supervisor.names("actor") == []
    watched.tick(1.0)
    assert not placement.ended
    watched.tick(100.0)
    assert placement.ended
    assert watched.told == ["placed", "removed"]


def test_a_start_that_fails_counts_as_an_end() -> None:
    watched = Watched(ScriptedEngine(), restarts=1)
    watched.tick(1.0, times=5)
    assert watched.told == ["restarted", "gone"]
    assert "no more processes" in watched.events[-1].sentence


def test_closing_tells_all_and_ends_all() -> None:
    watched = Watched(ScriptedEngine([RUNS]))
    watched.tick(1.0, times=2)
    watched.supervisor.close()
    assert watched.engine.placements[0].signals == [signal.SIGTERM]
    assert watched.engine.placements[0].ended
    assert watched.engine.closed


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_a_role_wants_is_said_in_words(nodes: int) -> None:
    role = Role("trainer", (), Path("unused.log"), nodes=nodes, cpus=8, gpus=8)
    share = "8 CPUs and 8 GPUs"
    assert role.wants == (share if nodes == 1 else f"2 nodes with {share} each")
