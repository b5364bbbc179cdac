"""What becomes of an earlier run's lines and checkpoints when a run starts in its folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from ludic.errors import CheckpointError
from ludic.training.checkpoints.checkpoint import Checkpointer, verify_checkpoint
from ludic.training.config import CheckpointConfig
from tests.training.checkpoints.test_checkpoint import assert_equal, make, run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "ck").iterdir() if path.is_dir())


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


def test_a_run_killed_before_its_first_checkpoint_leaves_no_line_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = make(tmp_path, every=100)

    async def some_steps() -> None:
        for _ in range(3):
            await killed.train_step()

    asyncio.run(some_steps())
    killed.close()
    assert steps(tmp_path) == [1, 2, 3]
    run(make(tmp_path, every=100), 5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    kept = (tmp_path / "superseded-metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [1, 2, 3]
    assert "superseded-metrics.jsonl" in caplog.text


def test_without_resume_a_run_keeps_its_own_checkpoints_and_the_earlier_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make(tmp_path, keep=2), 8)
    run(make(tmp_path, keep=2, resume=False), 4)
    assert names(tmp_path) == [
        "step-00000002",
        "step-00000004",
        "superseded-step-00000006",
        "superseded-step-00000008",
    ]
    assert "resume is off" in caplog.text
    resumed = make(tmp_path, keep=2)
    straight = run(make(tmp_path / "straight"), 6)
    assert_equal(run(resumed, 6), straight)


def test_without_resume_a_run_that_saves_nothing_leaves_nothing_to_resume(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    begun = make(tmp_path, resume=False)
    begun._resume()
    begun.close()
    fresh = make(tmp_path)
    fresh._resume()
    assert fresh.step == 0
    fresh.close()


def test_what_lies_ahead_of_a_latest_moved_back_is_kept_aside(tmp_path: Path) -> None:
    run(make(tmp_path, keep=4), 8)
    (tmp_path / "ck/latest").write_text("step-00000002")
    run(make(tmp_path, keep=2), 4)
    assert names(tmp_path) == [
        "step-00000002",
        "step-00000004",
        "superseded-step-00000006",
        "superseded-step-00000008",
    ]
    assert (tmp_path / "ck/latest").read_text() == "step-00000004"


def test_a_run_that_ends_between_two_checkpoints_is_saved_where_it_ended(tmp_path: Path) -> None:
    run(make(tmp_path, every=2), 1)
    assert names(tmp_path) == ["step-00000001"]
    run(make(tmp_path, every=2), 1)  # nothing is left to train, and nothing to save
    assert names(tmp_path) == ["step-00000001"]
    run(make(tmp_path, every=2, keep=9), 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    first = make(tmp_path)
    torch.manual_seed(5)
    run(first, 2)
    after = torch.rand(4)
    resumed = make(tmp_path)
    torch.manual_seed(6)
    resumed._resume()
    resumed.close()
    assert torch.equal(torch.rand(4), after)


def test_a_manifest_says_which_format_it_has_and_a_later_one_is_refused(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    path = tmp_path / "ck/step-00000002"
    manifest = verify_checkpoint(path)
    assert (manifest["format"], manifest["world_size"]) == (1, 1)
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(CheckpointError, match="has format 2; this Ludic reads up to 1"):
        verify_checkpoint(path)


def test_latest_is_the_newest_where_the_pointer_is_gone_or_nonsense(tmp_path: Path) -> None:
    run(make(tmp_path, every=1, keep=3), 3)
    pointer = tmp_path / "ck/latest"
    checkpoints = Checkpointer(CheckpointConfig(tmp_path / "ck"))
    pointer.write_text("step-00000002")
    assert checkpoints.latest() == tmp_path / "ck/step-00000002"
    for nonsense in ("../elsewhere", "step-", "step-00000099"):
        pointer.write_text(nonsense)
        assert checkpoints.latest() == tmp_path / "ck/step-00000003"
    pointer.unlink()
    assert checkpoints.latest() == tmp_path / "ck/step-00000003"
    resumed = make(tmp_path)
    resumed._resume()
    resumed.close()
    assert resumed.step == 3
    assert Checkpointer(CheckpointConfig(tmp_path / "none")).latest() is None


def test_a_stray_file_in_the_folder_stops_nothing(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    (tmp_path / "ck/.writing-stray").write_text("")
    (tmp_path / "ck/step-stray").write_text("")
    resumed = make(tmp_path)
    run(resumed, 4)
    assert resumed.step == 4
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    run(make(tmp_path, resume=False), 2)
