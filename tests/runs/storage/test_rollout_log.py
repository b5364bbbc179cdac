"""The log of a run's rollouts, when the run is resumed."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path

import pytest

from ludic.rollouts import RolloutWriter, read_rollouts
from ludic.rollouts.storage import rollout_row
from ludic.runs.storage import open_rollout_log, rollout_file
from ludic.types import Rollout

SUFFIXES = [".jsonl.gz", ".jsonl.zst"]


def episode(step: int, number: int = 0) -> Rollout:
    name = f"step-{step}/{number}"
    return Rollout(f"{name}/agent", (), episode_id=name)


def ids(path: Path) -> list[str]:
    return [rollout.episode_id for rollout in read_rollouts(path, on_cut="error")]


def test_new_runs_write_zstd_and_old_ones_go_on_with_gzip(tmp_path: Path) -> None:
    assert rollout_file(tmp_path, "train") == tmp_path / "train.jsonl.zst"
    (tmp_path / "train.jsonl.gz").touch()
    assert rollout_file(tmp_path, "train") == tmp_path / "train.jsonl.gz"
    assert rollout_file(tmp_path, "sft") == tmp_path / "sft.jsonl.zst"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_resumed_log_has_every_step_once(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train{suffix}"
    with open_rollout_log(path, 0) as writer:
        for step in range(4):
            writer.write(episode(step))
    with open_rollout_log(path, 2) as writer:
        writer.write(episode(2, 1))
    assert ids(path) == ["step-0/0", "step-1/0", "step-2/1"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("step", [1, 9])
def test_what_a_kill_left_unfinished_is_dropped_without_a_word(
    tmp_path: Path, suffix: str, step: int
) -> None:
    path = tmp_path / f"train{suffix}"
    with RolloutWriter(path) as writer:
        writer.write(episode(0))
        writer.flush()
        writer.write(episode(1))
    path.write_bytes(path.read_bytes()[:-12])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_rollout_log(path, step) as writer:
            writer.write(episode(1, 1))
    assert ids(path) == ["step-0/0", "step-1/1"]


def test_a_log_with_a_member_for_every_rollout_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl.gz"
    rows = [rollout_row(episode(step)) for step in range(3)]
    path.write_bytes(b"".join(gzip.compress(json.dumps(r).encode() + b"\n") for r in rows))
    with open_rollout_log(path, 3) as writer:
        writer.write(episode(3))
    assert ids(path) == [f"step-{step}/0" for step in range(4)]
