"""The trainer's books, and how old a group is."""

from __future__ import annotations

import pytest

from ludic.pipeline.ledger import Asked, Ledger
from ludic.pipeline.messages import Group
from ludic.pipeline.reading import judge, lag_of
from ludic.types import AgentStep, FinishReason, Rollout, TokenTrace, VersionSpan
from tests.pipeline.world import REQUEST


def of_versions(*versions: int) -> Rollout:
    """A rollout with one token of each version."""
    spans = tuple(VersionSpan(i, i + 1, version) for i, version in enumerate(versions))
    ids = tuple(range(len(versions)))
    trace = TokenTrace((1,), ids, tuple(-1.0 for _ in ids), spans)
    said = AgentStep(0, (), {"role": "assistant", "content": "x"}, FinishReason.STOP, trace)
    return Rollout(id="r", steps=(said,))


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    group = Group(0, (of_versions(7, 6), of_versions(3, 7)))
    assert lag_of(group, 8) == 5
    assert judge(group, 8, 4, "drop") == "stale"
    assert judge(group, 8, 5, "drop") is None
    assert lag_of(group, 2) == 0, "a newer one is of a trainer that was lost"


def test_a_dropped_unit_comes_again_once() -> None:
    books = Ledger()
    number = books.number(Asked((REQUEST,)))
    books.drop(number, "stale")
    assert books.waiting == [Asked((REQUEST,), number)]
    again = books.number(books.waiting.pop())
    books.drop(again, "stale")
    assert books.waiting == [Asked((REQUEST,), again)]


def test_a_unit_that_has_a_stand_in_already_does_not_come_again() -> None:
    books = Ledger()
    number = books.number(Asked((REQUEST,)))
    books.number(Asked((REQUEST,), number))
    books.drop(number, "stale")
    assert books.waiting == []
    waiting = Ledger(waiting=[Asked((REQUEST,), 0)])
    waiting.number(Asked((REQUEST,)))
    waiting.drop(0, "stale")
    assert len(waiting.waiting) == 1


@pytest.mark.parametrize("asked_again", [False, True])
def test_books_catch_up_with_what_a_lost_trainer_dropped(asked_again: bool) -> None:
    """Two units were asked for after the checkpoint. The first was dropped, and perhaps asked for
    again before the trainer was lost."""
    first, second, third = (Asked((REQUEST,) * n) for n in (1, 2, 3))
    books = Ledger(waiting=[first, second, third])
    notes = {0: "x:stale:", 1: "q:5-0:"}
    if asked_again:
        notes[2] = "q:6-0:0"
    books.catch_up(len(notes), notes)
    assert books.dropped == {"stale": 1}
    assert books.outstanding[1] == second
    again = Asked(first.requests, 0)
    if asked_again:
        assert (books.outstanding, books.waiting) == ({1: second, 2: again}, [third])
    else:
        assert (books.outstanding, books.waiting) == ({1: second}, [again, third])
