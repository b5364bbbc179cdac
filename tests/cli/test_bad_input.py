"""What is wrong is one sentence that says what to do, and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ludic.cli import _explained
from ludic.rollouts import RolloutWriter
from ludic.types import Rollout
from tests.cli.conftest import RUN, Ludic, Outcome

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def check(done: Outcome, *words: str) -> None:
    """One sentence on standard error with all of `words`, and nothing else there."""
    assert done.code == 2, done.out + done.err
    assert done.err.startswith("ludic: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.out + done.err
    for word in words:
        assert word in done.err


def test_an_unknown_environment_names_the_nearest(ludic: Ludic, letters: Path) -> None:
    done = ludic("train", letters, "env.kind=tic_tac_to", "--out", "run")
    check(done, "unknown environment 'tic_tac_to'", "'tic_tac_toe'")
    check(ludic("play", "tic_tac_to"), "'tic_tac_toe'")


def test_wrong_arguments_of_an_environment_are_said(ludic: Ludic, letters: Path) -> None:
    done = ludic("train", letters, "env.kwargs.wrong=1", "--out", "run")
    check(done, "wrong", "letters:Letters")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[env\n", ["not valid TOML", "line 1"]),
        ('[env]\nkind = "tic_tac_toe"\n[trainig]\n', ["trainig", "'training'", "line 3"]),
        ('[env]\nkind = "tic_tac_toe"\n[training]\nsteps = "x"\n', ["training.steps", "line 4"]),
        ('schema = 99\n[env]\nkind = "tic_tac_toe"\n', ["schema 99", "update your clone"]),
    ],
)
def test_a_wrong_run_file_names_the_place(
    ludic: Ludic, tmp_path: Path, text: str, words: list[str]
) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    check(ludic("train", "wrong.toml"), "wrong.toml", *words)


def test_a_wrong_override_is_said_to_come_from_the_command_line(
    ludic: Ludic, letters: Path
) -> None:
    check(ludic("train", letters, "training.step=3"), "'steps'", "command line")
    check(ludic("train", letters, "training.steps"), "section.key=value")


def test_a_run_that_is_not_there_lists_those_that_are(ludic: Ludic) -> None:
    check(ludic("train", "chess"), "chess", "tic-tac-toe")
    check(ludic("train"), "tic-tac-toe")
    check(ludic("eval", "chess"), "chess")
    check(ludic("eval"), "--compare")


def test_unknown_parts_of_a_run_are_named(ludic: Ludic, letters: Path) -> None:
    def tried(*overrides: str) -> Outcome:
        return ludic("train", letters, *overrides, "--out", "run-" + overrides[0].split("=")[0])

    check(tried("algorithm.name=grop"), "'grop'", "'grpo'")
    check(tried("algorithm.kwargs.groups=3"), "'grpo'", "'groups'")
    check(tried("algorithm.kwargs.aggregation=token_meen"), "'token_meen'", "'token_mean'")
    check(tried("sft.aggregation=groupmean"), "'groupmean'", "'group_mean'")
    check(tried("protocol.kind=single"), "'single'", "'single_agent'")
    check(tried("protocol.kwargs.parser=xmll"), "xmll")
    check(tried("sft.teacher=letters:nobody"), "letters:nobody")
    letters.write_text(letters.read_text().replace('teacher = "letters:teacher"', 'data = "x"'))
    check(tried("sft.data=nowhere.jsonl"), "nowhere.jsonl", "no such file")
    letters.write_text(RUN)
    check(tried("model.kwargs.size=3"), "model.kwargs", "size")
    check(tried("model.name=no/such-model"), "no/such-model", "tiny")
    check(tried("training.rollouts_per_update=7"), "rollouts_per_update=7", "group_size=4")


def test_what_is_wrong_is_found_before_anything_is_made(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*.json"))
    for override in (
        "env.kind=chess",
        "env.kwargs.wrong=1",
        "algorithm.name=grop",
        "training.rollouts_per_update=7",
        "sft.teacher=letters:nobody",
        "model.device=cuda:9",
    ):
        check(ludic("train", letters, override, "--out", "run"))
        check(ludic("train", letters, override, "--dry-run"))
    assert sorted(tmp_path.rglob("*.json")) == before


def test_a_missing_extra_is_named(
    ludic: Ludic, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    done = ludic("train", letters, "model.lora.rank=2", "--out", "run")
    check(done, "pip install -e '.[peft]'")


def test_a_gpu_that_is_not_there_is_said(
    ludic: Ludic, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = ludic("train", letters, "model.device=cuda", "--out", "run")
    check(done, "no GPU", "model.device=cpu")


def test_a_run_folder_that_exists_is_not_written_over(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    check(ludic("train", letters, "--out", "run"), "run exists already", "--resume run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_a_folder_that_holds_no_run_cannot_be_resumed(ludic: Ludic, tmp_path: Path) -> None:
    check(ludic("train", "--resume", tmp_path), "not a run folder")
    check(ludic("train", "--resume", tmp_path / "none"), "not a run folder")
    check(ludic("train", "tic-tac-toe", "--resume", tmp_path), "give no run file")


def test_a_resume_with_a_changed_configuration_is_refused(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    done = ludic("train", "--resume", folder, "training.learning_rate=1.0")
    check(done, "training.learning_rate", "training.steps")
    stored = json.loads((folder / "run.json").read_text())
    stored["schema"] = 7
    (folder / "run.json").write_text(json.dumps(stored))
    check(ludic("train", "--resume", folder), "schema 7", "update your clone")


def test_a_resume_of_a_changed_run_json_that_does_not_fit_the_checkpoint_is_refused(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    stored = json.loads((folder / "run.json").read_text())
    stored["model"]["kwargs"]["hidden_size"] = 32
    (folder / "run.json").write_text(json.dumps(stored))
    check(ludic("train", "--resume", folder), "another model")


def test_a_disk_that_fills_up_while_sampling_is_said_with_the_way_to_go_on(
    ludic: Ludic, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludic.runs.storage.RolloutWriter", _FullDisk)
    done = ludic("train", letters, "--out", "run")
    check(done, "disk is full", "--resume")
    monkeypatch.undo()
    monkeypatch.chdir(letters.parent)
    done = ludic("train", "--resume", "run")
    assert done.code == 0, done.err


class _FullDisk(RolloutWriter):
    """A writer to a device that has no room left."""

    def write(self, rollout: Rollout) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")


def test_a_disk_that_fills_up_at_a_checkpoint_leaves_the_last_good_one(
    ludic: Ludic, letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ludic.training.checkpoint_contents import write_shard

    written = 0

    def full(*args: Any) -> Any:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_shard(*args)

    monkeypatch.setattr("ludic.training.checkpoint_contents.write_shard", full)
    done = ludic("train", letters, "--out", "run")
    check(done, "could not write a checkpoint", "step-00000003", "Free some space")
    assert (tmp_path / "run/checkpoints/sft/latest").read_text() == "step-00000003"


def test_a_report_that_cannot_be_written_is_one_sentence(ludic: Ludic, trained: Path) -> None:
    done = ludic("eval", trained, "eval.episodes=2", "--output", "/dev/full")
    check(done, "disk is full")
    done = ludic("eval", trained, "eval.episodes=2", "--output", "no/such/folder/report.json")
    check(done, "no/such/folder")


def test_an_occupied_port_says_what_to_do() -> None:
    sentence = _explained(OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)))
    assert "another port" in sentence


def test_files_that_are_not_what_they_should_be_are_named(
    ludic: Ludic, tmp_path: Path, trained: Path
) -> None:
    (tmp_path / "junk.jsonl").write_text("junk\n")
    check(ludic("replay", "none.jsonl"), "none.jsonl")
    check(ludic("replay", "junk.jsonl"), "junk.jsonl")
    check(ludic("eval", "--compare", "junk.jsonl", trained), "junk.jsonl")
    check(ludic("generate", trained, "--output", "junk.jsonl"), "already exists")
    check(ludic("generate", trained, "--keep", "winning"), "winning")
    check(ludic("train", tmp_path / "junk.jsonl"), "junk.jsonl")


def test_a_run_without_a_checkpoint_cannot_be_evaluated(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    shutil.rmtree(folder / "checkpoints")
    check(ludic("eval", folder), "no checkpoint")


def test_debug_gives_the_traceback(ludic: Ludic) -> None:
    from ludic.errors import ConfigError

    with pytest.raises(ConfigError, match="chess"):
        ludic("train", "chess", "--debug")


def test_an_unknown_command_or_option_is_exit_code_2(ludic: Ludic) -> None:
    assert ludic("trian").code == 2
    assert ludic("train", "--no-such-option").code == 2
