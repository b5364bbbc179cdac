"""What a newcomer runs into: starts that fail, files that are missing, runs that learn nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ludic.runs.results.terminal import command_name
from tests.cli.conftest import LETTERS, Ludic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SHORT = ["sft.steps=1", "training.steps=1", "eval.episodes=2"]


def test_a_teacher_that_always_fails_says_why_and_once_repaired_the_run_goes_on(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    broken = LETTERS.replace('return rng.choice("AB")', 'raise RuntimeError("no idea")')
    (tmp_path / "letters.py").write_text(broken)
    done = ludic("train", letters, *SHORT, "sft.examples=3", "--out", "run")
    assert done.code == 2
    assert "every episode of the teacher failed, the first with: RuntimeError: no idea" in done.err
    assert f"resume it with: {command_name()} train --resume run" in done.out
    import letters as module  # type: ignore[import-not-found]

    module.teacher = lambda obs, rng: rng.choice("AB")
    done = ludic("train", "--resume", "run")
    assert done.code == 0, done.err


def test_what_is_offered_to_try_next_is_there(ludic: Ludic, letters: Path, tmp_path: Path) -> None:
    for name, keep in (("kept", "true"), ("lean", "false")):
        done = ludic("train", letters, *SHORT, f"logging.keep_rollouts={keep}", "--out", name)
        assert done.code == 0, done.err
        offered = re.findall(rf"\b{name}(?:/\S+)?", done.out.partition("Try next:")[2])
        assert name in offered
        assert all((tmp_path / path).exists() for path in offered)
        assert ("replay" in done.out) == (keep == "true")
    done = ludic("train", letters, *SHORT, "training.steps=0", "--out", "taught")
    assert "replay" not in done.out.partition("Try next:")[2]


def test_weights_that_were_cut_short_are_a_sentence(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    for weights in copy.glob("checkpoints/*/*/model/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:1000])
    for command in (("eval", "copy"), ("play", "tic_tac_toe", "--model", "copy")):
        done = ludic(*command)
        assert done.code == 2
        assert "damaged" in done.err
        assert "Traceback" not in done.err


def test_an_adapter_over_random_weights_is_warned_of(ludic: Ludic, letters: Path) -> None:
    pytest.importorskip("peft")
    done = ludic("train", letters, *SHORT, "model.lora.rank=2", "--out", "run")
    assert done.code == 0, done.err
    assert 'warning: model.name="tiny" has random weights' in done.out
