"""The tables of what can be played are true, as far as they promise something."""

from __future__ import annotations

import pytest

from tools.adapted import PAGE, games, tasks, try_game, try_task, working

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


def test_every_task_of_reasoning_gym_on_the_page_is_made_and_answered() -> None:
    promised, _ = working(PAGE.read_text(encoding="utf-8"))
    assert len(promised) > 100
    assert set(promised) <= set(tasks())
    assert {t.name: t.why for t in map(try_task, promised) if t.why} == {}


@pytest.mark.parametrize("part", range(3))
def test_every_game_of_textarena_on_the_page_is_made_and_stepped(part: int) -> None:
    _, promised = working(PAGE.read_text(encoding="utf-8"))
    assert len(promised) > 70
    assert set(promised) <= set(games())
    tried = [try_game(name) for name in promised[part::3]]
    assert {t.name: t.why or t.notes for t in tried if t.why or t.notes} == {}
