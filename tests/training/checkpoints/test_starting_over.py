"""What becomes of an earlier run's lines and checkpoints when a run starts in its folder."""

from __future__ import annotations

import asyncio
import json
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from ludic.errors import CheckpointError, DamagedCheckpointError
from ludic.inference.tiny import tiny_model
from ludic.plumbing.files import file_checksum
from ludic.training.checkpoint import Checkpointer
from ludic.training.checkpoint_contents import TrainerState, verify_checkpoint
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.update.optimizer import MasterAdamW
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
    asyncio.run(begun.start())
    begun.close()
    fresh = make(tmp_path)
    asyncio.run(fresh.start())
    assert fresh.step == 0
    fresh.close()


def test_without_resume_checkpoints_that_nothing_points_to_are_kept_aside(tmp_path: Path) -> None:
    run(make(tmp_path, keep=1), 2)
    (tmp_path / "ck/latest").unlink()
    run(make(tmp_path, keep=1, resume=False), 1)
    assert names(tmp_path) == ["step-00000001", "superseded-step-00000002"]


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
    asyncio.run(resumed.start())
    resumed.close()
    assert torch.equal(torch.rand(4), after)


def test_a_manifest_says_which_format_it_has_and_a_later_one_is_refused(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    path = tmp_path / "ck/step-00000002"
    manifest = verify_checkpoint(path)
    assert (manifest["format"], manifest["world_size"]) == (2, 1)
    config = path / "model/config.json"
    assert manifest["files"]["model/config.json"] == {
        "bytes": config.stat().st_size,
        "checksum": file_checksum(config),
    }
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 3}))
    with pytest.raises(CheckpointError, match="has format 3; this Ludic reads up to 2"):
        verify_checkpoint(path)


def test_checksums_of_the_first_format_are_understood(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    path = tmp_path / "ck/step-00000002"
    manifest = verify_checkpoint(path)
    files = {}
    for name, facts in manifest["files"].items():
        digest = blake2b((path / name).read_bytes(), digest_size=16).hexdigest()
        files[name] = {"bytes": facts["bytes"], "blake2b": digest}
    older = {**manifest, "format": 1, "files": files}
    (path / "manifest.json").write_text(json.dumps(older))
    assert verify_checkpoint(path) == older
    files["model/config.json"]["blake2b"] = "0" * 32
    (path / "manifest.json").write_text(json.dumps(older))
    with pytest.raises(DamagedCheckpointError, match="is not what was written"):
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
    asyncio.run(resumed.start())
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


def test_what_is_set_aside_again_and_again_is_all_kept(tmp_path: Path) -> None:
    checkpoints = Checkpointer(CheckpointConfig(tmp_path))
    for number in range(4):
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1" / str(number)).touch()
        checkpoints._set_aside(tmp_path / "step-1", "damaged")
    kept = {p.name: [f.name for f in p.iterdir()] for p in tmp_path.iterdir()}
    assert kept == {
        "damaged-step-1": ["0"],
        "damaged-step-1-2": ["1"],
        "damaged-step-1-3": ["2"],
        "damaged-step-1-4": ["3"],
    }


def test_a_checkpoint_from_before_the_first_step_has_no_moments(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = MasterAdamW(model.named_parameters(), TrainerConfig())
    checkpoints = Checkpointer(CheckpointConfig(tmp_path))
    checkpoints.save(model, optimizer, TrainerState(0, 0))
    manifest = verify_checkpoint(tmp_path / "step-00000000")
    names = {f"{name}/weight" for name in optimizer.parameters}
    assert manifest["tensors"].keys() == names
    again = tiny_model(seed=1)
    fresh = MasterAdamW(again.named_parameters(), TrainerConfig())
    state = Checkpointer(CheckpointConfig(tmp_path)).resume(again, fresh)
    assert state == TrainerState(0, 0)
    assert fresh.state_dict() == {}
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter)


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = tiny_model()
    optimizer = MasterAdamW(model.named_parameters(), TrainerConfig())
    checkpoints = Checkpointer(CheckpointConfig(tmp_path / "file/ck"))
    with pytest.raises(CheckpointError, match=r"could not write .*there is no earlier one"):
        checkpoints.save(model, optimizer, TrainerState(1, 1))
