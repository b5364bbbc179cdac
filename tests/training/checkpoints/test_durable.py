"""A checkpoint is on the disk before anything vouches for it, or is deleted because of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ludic.errors import CheckpointError, DamagedCheckpointError
from ludic.training.checkpoint_contents import TrainerState, verify_checkpoint
from tests.training.checkpoints.test_checkpoint import make, run


def name_of(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells files apart by /proc")
def test_files_and_folders_are_on_the_disk_before_the_manifest_and_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, every=1, keep=1)
    trainer.train_sync(1)
    calls: list[tuple[str, str]] = []
    sync, rename, remove = os.fsync, os.replace, shutil.rmtree

    def fsync(handle: int) -> None:
        calls.append(("sync", os.path.relpath(name_of(handle), tmp_path / "ck")))
        sync(handle)

    def replace(a: Any, b: Any) -> None:
        calls.append(("rename", os.path.relpath(b, tmp_path / "ck")))
        rename(a, b)

    def rmtree(path: Any, **options: Any) -> None:
        if Path(path).exists():
            calls.append(("remove", os.path.relpath(path, tmp_path / "ck")))
        remove(path, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    trainer.train_sync(1)
    trainer.close()
    monkeypatch.undo()

    whole = tmp_path / "ck/step-00000002"
    new = ".writing-step-00000002"
    manifest = calls.index(("sync", f"{new}/manifest.json"))
    for path in [whole, *whole.rglob("*")]:
        if path.name != "manifest.json":
            name = os.path.normpath(f"{new}/{path.relative_to(whole)}")
            assert ("sync", name) in calls[:manifest], f"{name} was not synced before the manifest"
    named = calls.index(("rename", "step-00000002"))
    assert ("sync", new) in calls[manifest:named]
    pointed = calls.index(("rename", "latest"))
    assert ("sync", ".") in calls[named:pointed]
    pruned = calls.index(("rename", ".writing-step-00000001"))
    assert ("sync", ".") in calls[pointed:pruned]
    assert not [what for what in calls[:pruned] if what[0] == "remove"]
    assert calls[-1] == ("remove", ".writing-step-00000001")
    assert sorted(p.name for p in (tmp_path / "ck").glob("*step*")) == ["step-00000002"]


def test_a_checkpoint_that_is_written_twice_is_never_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path)
    trainer.train_sync(2)
    saver = trainer._checkpoints
    assert saver is not None
    rename = os.replace

    def killed(a: Any, b: Any) -> None:
        if Path(b).name == "step-00000002":
            raise OSError("killed")
        rename(a, b)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(CheckpointError, match="killed"):
        saver.save(trainer.model, trainer.optimizer, TrainerState(2, 2))
    trainer.close()
    assert verify_checkpoint(tmp_path / "ck/superseded-step-00000002")["state"]["step"] == 2


def test_what_cannot_be_deleted_stays_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    trainer = make(tmp_path, every=1, keep=1)
    run(trainer, 2)
    saver = trainer._checkpoints
    assert saver is not None
    saver.save(trainer.model, trainer.optimizer, TrainerState(2, 2))  # in the place of another
    assert saver.resume(trainer.model, trainer.optimizer) == TrainerState(2, 2)
    assert sorted(p.name for p in (tmp_path / "ck").glob("*step*")) == [
        ".writing-step-00000001",
        "step-00000002",
        "superseded-step-00000002",
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"files": {}}, "does not name state-00000"),
        ({"files": None}, "manifest"),
        ({"world_size": 2}, "does not name state-00001"),
        ({"tensors": None}, "manifest"),
        ({"fingerprint": ...}, "has no fingerprint"),
        ({"state": {}}, "manifest"),
        ({"format": "2"}, "manifest"),
        ("no model", "names no file of the model"),
        ("no state", "does not name state-00000"),
        ("no checksum", "does not say what model/config.json is to be"),
    ],
)
def test_a_manifest_that_vouches_for_less_than_a_checkpoint_is_damage(
    tmp_path: Path, change: Any, says: str
) -> None:
    run(make(tmp_path), 2)
    path = tmp_path / "ck/step-00000002"
    manifest = verify_checkpoint(path)
    if change == "no model":
        manifest["files"] = {k: v for k, v in manifest["files"].items() if "model/" not in k}
    elif change == "no state":
        manifest["files"] = {k: v for k, v in manifest["files"].items() if "model/" in k}
    elif change == "no checksum":
        del manifest["files"]["model/config.json"]["checksum"]
    else:
        manifest = {k: v for k, v in (manifest | change).items() if v is not ...}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match=says):
        verify_checkpoint(path)
