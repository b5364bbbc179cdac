"""Kills and Ctrl-C: a run goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ludic.rollouts import read_rollouts
from tests.cli.conftest import LETTERS, RUN, Ludic, forked, started
from tests.forked import Forked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def written(where: Path) -> Path:
    where.mkdir()
    (where / "letters.py").write_text(LETTERS)
    (where / "letters.toml").write_text(RUN)
    return where


def line_with(process: subprocess.Popen[str] | Forked, word: str) -> str:
    """Reads until a line has `word`."""
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"the command ended without saying {word!r}")


def finish(ludic: Ludic, where: Path) -> None:
    """Resumes the run, or starts it where it never began, in this process and to its end."""
    begun = (where / "run" / "origin.json").is_file()
    arguments = ["--resume", "run"] if begun else ["letters.toml", "--out", "run"]
    with contextlib.chdir(where):
        done = ludic("train", *arguments)
    assert done.code == 0, done.out + done.err


def result(folder: Path) -> dict[str, Any]:
    """All that must not depend on interruptions."""
    summary = json.loads((folder / "summary.json").read_text())
    del summary["seconds"]
    newest = folder / "checkpoints" / "rl" / "step-00000004" / "model" / "model.safetensors"
    rollouts = list(read_rollouts(folder / "rollouts" / "train.jsonl.zst", on_cut="error"))
    steps = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "summary": summary,
        "weights": newest.read_bytes(),
        "rollouts": sorted(
            (
                (r.id, r.total_reward, r.sampling_seed, [step.trace for step in r.agent_steps])
                for r in rollouts
            ),
            key=lambda row: row[0],
        ),
        "steps": [json.loads(line)["train/step"] for line in steps],
    }


def kill_at_random(where: Path, rng: random.Random) -> bool:
    """Starts or resumes the run and kills it a random while after the model is there. Whether it
    was still running."""
    begun = (where / "run" / "origin.json").is_file()
    arguments = ["--resume", "run"] if begun else ["letters.toml", "--out", "run"]
    with forked(where, "train", *arguments) as process:
        line_with(process, "parameters")
        time.sleep(rng.uniform(0.0, 1.5))
        landed = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    return landed


def test_a_killed_run_ends_like_one_that_never_was(
    ludic: Ludic, tmp_path: Path, trained: Path
) -> None:
    where = written(tmp_path / "killed")
    assert kill_at_random(where, random.Random(0)), "the kill came after the end"
    finish(ludic, where)
    assert result(where / "run") == result(trained)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_moments_change_nothing(
    ludic: Ludic, tmp_path: Path, trained: Path
) -> None:
    rng, landed, attempt = random.Random(2), 0, 0
    while landed < 20:
        attempt += 1
        assert attempt < 40
        where = written(tmp_path / f"killed-{attempt}")
        for _ in range(rng.randint(1, 3)):
            landed += kill_at_random(where, rng)
        finish(ludic, where)
        assert result(where / "run") == result(trained)


def test_a_kill_within_a_step_is_made_up_for(ludic: Ludic, tmp_path: Path, trained: Path) -> None:
    """Killed when the second update's rollouts were written and its checkpoint was not."""
    where = written(tmp_path / "killed")
    with forked(where, "train", "letters.toml", "--out", "run") as process:
        line_with(process, "step      2  outcome/right")
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    log = where / "run" / "rollouts" / "train.jsonl.zst"
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:100])  # as a kill in the middle of a write leaves it
    finish(ludic, where)
    assert result(where / "run") == result(trained)


def test_ctrl_c_stops_after_the_step_with_a_checkpoint_and_the_run_can_go_on(
    ludic: Ludic, tmp_path: Path, trained: Path
) -> None:
    where = written(tmp_path / "stopped")
    with started(where, "train", "letters.toml", "--out", "run") as process:
        line_with(process, "step      1  outcome/right")
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    assert "ludic train --resume run" in text
    assert "Traceback" not in text
    assert not (where / "run" / "summary.json").exists()
    latest = (where / "run" / "checkpoints" / "rl" / "latest").read_text()
    assert "step-00000001" <= latest < "step-00000004"
    finish(ludic, where)
    assert result(where / "run") == result(trained)


def test_ctrl_c_during_an_evaluation_does_not_begin_the_next_stage(tmp_path: Path) -> None:
    where = written(tmp_path / "stopped")
    arguments = ["letters.toml", "eval.episodes=20000", "--out", "run"]
    with forked(where, "train", *arguments) as process:
        line_with(process, "parameters")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    assert "--resume" in text
    assert "supervised" not in text
    assert not (where / "run" / "eval" / "before.json").exists()


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    where = written(tmp_path / "stopped")
    hang = "import time, os; time.sleep(50 if os.path.exists('hang') else 0); right = action"
    source = LETTERS.replace("blocking = False", "blocking = True")
    (where / "letters.py").write_text(source.replace("right = action", hang))
    arguments = ["letters.toml", "training.steps=100000", "--out", "run"]
    with started(where, "train", *arguments) as process:
        line_with(process, "RL: ")
        (where / "hang").touch()
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        line_with(process, "press Ctrl-C again")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT  # 130 in a shell


def test_a_second_ctrl_c_ends_a_run_whose_environment_holds_the_event_loop(tmp_path: Path) -> None:
    where = written(tmp_path / "stuck")
    forever = "open('stuck', 'w').close()\n        while True:\n            pass"
    (where / "letters.py").write_text(
        LETTERS.replace("right = action", f"{forever}\n        right = action")
    )
    with forked(where, "train", "letters.toml", "--out", "run") as process:
        deadline = time.monotonic() + 300
        while not (where / "stuck").exists():
            assert process.poll() is None, process.communicate(timeout=60)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        line_with(process, "press Ctrl-C again")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
