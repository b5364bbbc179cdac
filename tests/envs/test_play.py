"""Playing by hand: the shared loop, and each environment as a program."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.envs import DatasetQAEnv, TwoPlayerTicTacToeEnv
from ludic.envs.play import play_by_hand


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


@pytest.mark.integration
@pytest.mark.parametrize(
    ("module", "arguments", "lines", "shown"),
    [
        ("tic_tac_toe", ["--mark", "O", "--seed", "1"], "", "You are O."),
        ("tic_tac_toe", ["--two-players"], "A1\nA2\nB1\nB2\nC1\n", "You win."),
        ("key_door", ["--seed", "1"], "north\n", "You have no key."),
        ("dataset_qa_env", ["--path", "rows.jsonl"], "4\n", "total reward 0"),
        ("gsm8k", ["--path", "rows.jsonl"], "4\n", "total reward 1"),
        ("math", ["--path", "rows.jsonl"], "4\n", "total reward 0"),
    ],
)
def test_each_environment_is_a_program(
    tmp_path: Path, module: str, arguments: list[str], lines: str, shown: str
) -> None:
    row = {"question": "2 + 2?", "answer": "2+2=4\n#### 4", "problem": "2 + 2?"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    done = subprocess.run(
        [sys.executable, "-m", f"ludic.envs.{module}", *arguments],
        input=lines,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
        check=False,
    )
    assert shown in done.stdout, done.stderr
    assert done.stderr == ""
