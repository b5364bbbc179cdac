"""The scripts on the server: leases, takeover, doubles, commits, and whose keys they touch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ludic.errors import ConfigError
from ludic.pipeline.store import EmptiedError, LostRunError, PipelineConfig, Store, entries
from tests.pipeline.world import server_of

pytestmark = pytest.mark.redis

LEASE = 60_000


class Streams:
    """A trainer and its actors, spelled out in scripts."""

    def __init__(self, store: Store, token: str = "t", limit: int = 10**9) -> None:
        self.store = store
        self.answer = store.run("open", token, LEASE, "here", "", limit)
        self.guard = (token, self.answer[1], LEASE)

    def ask(self, *numbers: int, how: str = "new", size: int = 1) -> int:
        rows = [x for n in numbers for x in (n, "", b"m" * size)]
        return int(self.store.run("ask", *self.guard, how, *rows)[1])

    def take(self, name: str = "a", count: int = 10, lease: int = LEASE) -> list[tuple[str, int]]:
        answer = self.store.run("take", name, count, lease, "0-0")
        return [(entry, number) for entry, number, _ in entries(answer[1])]

    def append(self, entry: str, number: int, message: bytes = b"group", *, name: str = "a") -> str:
        return str(self.store.run("append", name, entry, number, message, 5).decode())

    def read(self, start: str = ">") -> list[int]:
        return [n for _, n, _ in entries(self.store.run("read", *self.guard, start, 100)[1])]

    def commit(self, low: int, *others: int) -> int:
        return int(self.store.run("commit", *self.guard, low, "{}", *others)[1])


@pytest.fixture
def streams(store: Store) -> Streams:
    return Streams(store)


def until(holds: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return found


def test_looking_for_what_is_not_there_writes_nothing(streams: Streams) -> None:
    streams.guard = (*streams.guard[:2], 10**8)  # no tenth of it passes here
    streams.ask(0)
    streams.take()

    def look() -> int:
        assert (streams.read(), streams.take()) == ([], [])
        assert streams.store.run("news") == [b"", b""]
        return int(streams.store._redis.info("persistence")["rdb_changes_since_last_save"])

    changes = look()  # which makes the reader's place in the stream
    assert look() == changes
    streams.store.run("announce", *streams.guard, "{}", 0)
    streams.store.run("end", *streams.guard, "why")
    policy, ended = streams.store.run("news")
    assert (policy.endswith(b",{}]"), ended) == (True, b"why")


def test_a_unit_goes_the_whole_way_once(streams: Streams) -> None:
    assert streams.ask(0, 1) == 2
    (first, second) = streams.take()
    assert streams.append(*first) == "ok"
    assert streams.append(*second) == "ok"
    assert streams.read() == [0, 1]
    assert streams.read() == []
    assert streams.commit(2) == 2
    facts = streams.store.facts()
    assert (facts["requests"], facts["groups"], facts["units"]) == (0, 0, {})
    assert facts["meta"]["bytes"] == "0"


def test_a_group_is_appended_once_however_often_it_is_sent(streams: Streams) -> None:
    streams.ask(0)
    ((entry, number),) = streams.take()
    assert [streams.append(entry, number) for _ in range(3)] == ["ok", "double", "double"]
    assert streams.read() == [0]


def test_a_group_of_a_committed_unit_is_refused(streams: Streams) -> None:
    streams.ask(0)
    ((entry, number),) = streams.take()
    streams.append(entry, number)
    streams.commit(1)
    assert streams.append(entry, number) == "gone"
    assert streams.read() == []


def test_a_unit_is_asked_for_once_however_often_it_is_made(streams: Streams) -> None:
    assert streams.ask(0, 1) == 2
    assert streams.ask(0, 1, 2) == 1
    assert [n for _, n in streams.take()] == [0, 1, 2]


def test_two_actors_never_hold_the_same_unit(streams: Streams) -> None:
    streams.ask(*range(10))
    first, second = streams.take("a", 6), streams.take("b", 6)
    assert [n for _, n in first] + [n for _, n in second] == list(range(10))


def test_a_dead_actors_units_are_taken_over_each_once(streams: Streams) -> None:
    streams.ask(0, 1)
    dead = streams.take("dead")
    assert streams.take("b") == []
    taken = until(lambda: streams.take("b", lease=50))
    assert taken == dead
    assert streams.take("c") == []
    assert streams.append(*dead[0], name="dead") == "taken over"
    assert streams.append(*taken[0], name="b") == "ok"
    assert streams.append(*dead[0], name="dead") == "double"


def test_a_heartbeat_keeps_the_lease_and_names_what_was_lost(streams: Streams) -> None:
    streams.ask(0, 1)
    (kept, given_up) = streams.take("a")
    time.sleep(1.5)
    streams.store.run("beat", "a", "{}", kept[0])
    assert streams.take("b", lease=1400) == [given_up]
    assert streams.store.run("beat", "a", "{}", kept[0], given_up[0])[2] == [given_up[0].encode()]


def test_what_a_leaving_actor_holds_is_free_at_once(streams: Streams) -> None:
    streams.ask(0)
    held = streams.take("a")
    assert streams.store.run("leave", "a") == 1
    assert streams.take("b") == held


def test_actors_take_nothing_new_while_the_bytes_are_over_the_bound(store: Store) -> None:
    streams = Streams(store, limit=10)
    streams.ask(0, 1, 2)
    ((entry, number),) = streams.take(count=1)
    streams.append(entry, number, b"g" * 20)
    assert streams.take() == []
    streams.read()
    streams.commit(1)
    assert [n for _, n in streams.take()] == [1, 2]


def test_what_was_read_and_not_committed_is_read_again(streams: Streams) -> None:
    streams.ask(0, 1, 2)
    for entry, number in streams.take():
        streams.append(entry, number)
    assert streams.read() == [0, 1, 2]
    streams.commit(1)
    assert streams.read("0") == [1, 2]


def test_a_commit_out_of_order_frees_the_group_and_remembers_the_number(streams: Streams) -> None:
    streams.ask(0, 1, 2)
    taken = streams.take()
    streams.append(*taken[2])
    assert streams.commit(0, 2) == 1
    assert streams.append(*taken[2]) == "double"
    streams.append(*taken[0])
    streams.append(*taken[1])
    assert streams.commit(3) == 2
    assert streams.store.facts()["units"] == {}


def test_a_second_trainer_is_refused_while_the_first_holds_the_run(streams: Streams) -> None:
    held = streams.store.run("open", "other", LEASE, "there", "", 1)
    assert held[0] == b"held"
    assert held[1] == b"here"


def test_a_trainer_that_was_away_too_long_can_change_nothing(streams: Streams) -> None:
    streams.ask(0)
    streams.store.run("close", "t")
    later = Streams(streams.store, token="later")
    for call in (lambda: streams.ask(1), streams.read, lambda: streams.commit(1)):
        with pytest.raises(LostRunError, match="another trainer holds the run"):
            call()
    assert later.ask(1) == 1


def test_a_lease_that_ran_out_is_renewed_where_nobody_took_the_run(streams: Streams) -> None:
    streams.store.run("close", "t")  # as if it had run out
    assert streams.ask(0) == 1


def test_another_configuration_under_the_same_name_is_refused(store: Store) -> None:
    store.run("open", "t", LEASE, "here", "one", 1)
    store.run("close", "t")
    assert store.run("open", "t", LEASE, "here", "two", 1)[0] == b"other"


def test_what_the_server_lost_is_asked_for_again_and_nothing_else(streams: Streams) -> None:
    streams.ask(0, 1, 2)
    for entry, number in streams.take(count=1):
        streams.append(entry, number)
    server_of(streams.store).hdel(streams.store.keys["units"], 1)
    assert streams.ask(0, 1, 2, how="again") == 1
    assert streams.ask(0, 1, 2, how="again") == 0


def test_a_reset_forgets_the_streams_and_refuses_what_was_under_way(streams: Streams) -> None:
    streams.ask(0, 1)
    old = streams.take()
    streams.store.run("reset", *streams.guard, 0, 2)
    assert streams.ask(0, 1, how="again") == 2
    assert streams.append(*old[0]) == "gone"
    assert [n for _, n in streams.take()] == [0, 1]


def test_only_keys_of_the_run_are_touched(server: Any, config: PipelineConfig) -> None:
    other = Store(replace(config, run="somebody-else"))
    raw = server_of(other)
    raw.set("mine", "1")
    Streams(other).ask(0)
    before = {key: raw.dump(key) for key in raw.keys("*") if b"trainer" not in key}
    store = Store(config)
    streams = Streams(store)
    streams.ask(*range(5))
    for entry, number in streams.take():
        streams.append(entry, number)
    streams.read()
    streams.commit(3)
    streams.store.run("reset", *streams.guard, 3, 5)
    store.forget()
    assert {key: raw.dump(key) for key in raw.keys("*") if b"trainer" not in key} == before
    other.forget()
    raw.delete("mine")
    assert not raw.keys(f"ludic:{{{config.run}}}:*")


def test_a_server_of_ours_loses_nothing_that_it_confirmed(store: Store) -> None:
    assert store.durability() == "always"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a{b}", "x" * 300])
def test_a_run_name_that_could_reach_other_keys_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        PipelineConfig(run=name)


def test_only_the_actor_that_holds_a_unit_can_send_its_group(streams: Streams) -> None:
    streams.ask(0, 1)
    first, second = streams.take("a")
    assert streams.append(*first, name="somebody") == "taken over"
    assert streams.append(second[0], first[1], name="a") == "gone"
    assert streams.store.facts()["requests"] == 2, "nothing is acknowledged by mistake"
    assert [streams.append(*held, name="a") for held in (first, second)] == ["ok", "ok"]


def test_nothing_is_taken_after_the_end_of_the_run(streams: Streams) -> None:
    streams.ask(0)
    streams.store.run("end", *streams.guard, "it is done")
    assert streams.take() == []
    streams.store.run("announce", *streams.guard, "{}", 0)  # a trainer goes on
    assert [n for _, n in streams.take()] == [0]


def test_serials_grow_where_the_server_has_forgotten_them(streams: Streams) -> None:
    def announce(before: int) -> int:
        return int(streams.store.run("announce", *streams.guard, "{}", before)[1])

    first, second = announce(0), announce(0)
    assert second > first
    server_of(streams.store).hdel(streams.store.keys["meta"], "serial")
    while time.time() * 1000 <= second + 1:
        time.sleep(0.001)  # the serials were ahead of the clock, which counts milliseconds
    assert announce(0) > second, "by the clock"
    assert announce(second + 10**9) == second + 10**9 + 1, "and where the clock is behind"


def test_a_server_that_knows_nothing_of_the_trainer_says_so(streams: Streams) -> None:
    streams.store.forget()
    with pytest.raises(EmptiedError, match="has lost what it held"):
        streams.ask(0)
    answer = streams.store.run("open", "t", LEASE, "here", "", 1, 7)
    assert int(answer[1]) == 8, "two attempts never share a number"
