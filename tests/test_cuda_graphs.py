"""Captures hold the collector; a stand-in graph, since there is no GPU here."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ludic.plumbing.cuda_streams import capture


class Graph:
    """Notes whether Python collects garbage from beginning to end."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.options: dict[str, Any] = {}

    def capture_begin(self, **options: Any) -> None:
        self.options = options
        self.calls.append(("begin", gc.isenabled()))

    def capture_end(self) -> None:
        self.calls.append(("end", gc.isenabled()))


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_nothing_is_collected_during_a_capture() -> None:
    graph: Any = Graph()
    with capture(graph, "pool"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert graph.calls == [("begin", False), ("end", False)]
    assert graph.options == {"pool": "pool", "capture_error_mode": "thread_local"}


def test_a_capture_that_fails_ends_and_lets_the_collector_go_on() -> None:
    graph: Any = Graph()
    with pytest.raises(ValueError, match="no"), capture(graph, None):
        raise ValueError("no")
    assert gc.isenabled()
    assert graph.calls[-1] == ("end", False)


def test_who_had_it_off_finds_it_off() -> None:
    gc.disable()
    with capture(Graph(), None):  # type: ignore[arg-type]
        pass
    assert not gc.isenabled()


def test_the_first_of_two_threads_to_end_does_not_start_the_collector_for_the_other() -> None:
    inside, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with capture(Graph(), None):  # type: ignore[arg-type]
            inside.set()
            assert may_end.wait(20)

    thread = threading.Thread(target=other)
    with capture(Graph(), None):  # type: ignore[arg-type]
        thread.start()
        assert inside.wait(20)
    assert not gc.isenabled()
    may_end.set()
    thread.join(20)
    assert gc.isenabled()
