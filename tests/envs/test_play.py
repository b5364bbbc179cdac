"""Playing by hand: the loop, and each built-in environment in it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ludic.envs import DatasetQAEnv, SingleAgentEnv, TwoPlayerTicTacToeEnv
from ludic.registry import make_env
from ludic.runs.playing import play_by_hand
from ludic.types import StepOutcome


def test_an_episode_is_played_from_lines_of_text() -> None:
    out = io.StringIO()
    lines = io.StringIO("A1\nA2\nB1\nB2\nC1\n")
    assert play_by_hand(TwoPlayerTicTacToeEnv(), seed=0, stdin=lines, stdout=out) == 0
    shown = out.getvalue()
    assert "[X] reward 1 terminated" in shown
    assert "[O] total reward -1" in shown


def test_the_parts_of_a_reward_are_shown() -> None:
    env = DatasetQAEnv(rows=[{"question": "2 + 2?", "answer": "4"}])
    out = io.StringIO()
    assert play_by_hand(env, stdin=io.StringIO("4\n"), stdout=out) == 0
    assert "reward 1 exact 1 terminated" in out.getvalue()


@pytest.mark.parametrize("lines", ["", "A1\n", "A1\n\n"])
def test_an_episode_can_be_left(lines: str) -> None:
    out = io.StringIO()
    assert play_by_hand(TwoPlayerTicTacToeEnv(), stdin=io.StringIO(lines), stdout=out) == 1
    assert "left before the end" in out.getvalue()


@pytest.mark.parametrize(
    ("name", "options", "lines", "shown"),
    [
        ("tic_tac_toe", {"mark": "O"}, "", "You are O."),
        ("tic_tac_toe_two_player", {}, "A1\nA2\nB1\nB2\nC1\n", "You win."),
        ("key_door", {}, "north\n", "You have no key."),
        ("dataset_qa", {"path": "rows.jsonl"}, "4\n", "total reward 0"),
        ("gsm8k", {"path": "rows.jsonl"}, "4\n", "total reward 1"),
        ("math", {"path": "rows.jsonl"}, "4\n", "total reward 0"),
    ],
)
def test_each_built_in_environment_can_be_played(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: Mapping[str, Any],
    lines: str,
    shown: str,
) -> None:
    row = {"question": "2 + 2?", "answer": "2+2=4\n#### 4", "problem": "2 + 2?"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    play_by_hand(make_env(name, **options), seed=1, stdin=io.StringIO(lines), stdout=out)
    assert shown in out.getvalue()


def test_what_an_environment_says_cannot_steer_the_terminal() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J"

    class Hostile(SingleAgentEnv):
        def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return f"opening {hostile}", {}

        def env_step(self, action: str) -> StepOutcome:
            parts = {f"part {hostile}": 1.0}
            return StepOutcome(f"end {hostile}", 1.0, terminated=True, reward_components=parts)

        def env_current_obs(self) -> str:
            return ""

        def suggested_sysprompt(self, agent_id: str) -> str:
            return f"prompt {hostile}"

    out = io.StringIO()
    assert play_by_hand(Hostile(), stdin=io.StringIO("go\n"), stdout=out) == 0
    for place in ("prompt", "opening", "part", "end"):
        assert f"{place} \\x1b]0;owned\\x07\\x1b[2J" in out.getvalue()
    assert "\x1b" not in out.getvalue()
