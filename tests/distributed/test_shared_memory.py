"""Weights in shared memory: no room for them, and what dead processes left there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ludic.distributed import shared_folders
from ludic.distributed.shared_folders import SharedFolder
from ludic.distributed.vllm import shared_memory
from ludic.distributed.vllm.shared_memory import write_shared
from ludic.errors import PublishError

WEIGHTS = {"a": torch.ones(1024, 1024)}  # 4 MiB

OTHER = """
import sys, time, torch
from pathlib import Path
from ludic.distributed import shared_folders
from ludic.distributed.vllm import shared_memory
shared_folders.shared_folder = lambda: Path(sys.argv[1])
path, folder = shared_memory.write_shared({"a": torch.ones(9)})
print(path, flush=True)
time.sleep(300)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    monkeypatch.setattr(shared_folders, "shared_folder", lambda: tmp_path)
    return tmp_path


def test_too_little_room_is_said_with_the_remedy_before_anything_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(folder))(64 << 20, 63 << 20, 1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        PublishError, match=r"4\.0 MiB in .*1\.0 MiB are free.*--shm-size"
    ) as caught:
        write_shared(WEIGHTS)
    assert str(folder) in str(caught.value)
    assert not list(folder.iterdir())


def test_room_that_goes_while_it_is_written_is_said_as_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory, "fill_file", full)
    with pytest.raises(PublishError, match="--shm-size"):
        write_shared(WEIGHTS)
    assert not list(folder.glob("ludic-*"))


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(
    folder: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        assert theirs.parent.parent == folder
        first, mine = write_shared(WEIGHTS)
        assert theirs.is_file()
        other.send_signal(signal.SIGKILL)
    _, next_one = write_shared(WEIGHTS)
    assert first.is_file(), "one's own are not abandoned"
    assert sorted(folder.iterdir()) == sorted([mine.path, next_one.path])


def test_what_is_left_is_removed_by_who_takes_a_folder_by_name_and_never_while_it_is_held(
    folder: Path,
) -> None:
    left = folder / "ludic-publish-copy-a"
    (left / "sub").mkdir(parents=True)
    for name in ("lock", "weights.safetensors", "sub/more"):
        (left / name).touch()
    (folder / "ludic-publish-copy-b").mkdir()  # whose remover was killed
    held = SharedFolder("copy-c")
    assert list(folder.iterdir()) == [held.path]
    again = SharedFolder("copy-c")
    SharedFolder("copy-d").close()
    assert list(folder.iterdir()) == [held.path]
    held.close()
    assert list(folder.iterdir()) == [held.path]
    again.close()
    assert not list(folder.iterdir())


def test_a_file_system_that_reserves_no_room_is_written_to_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = errno.EOPNOTSUPP

    def refuse(*_: Any) -> NoReturn:
        raise OSError(refusal, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path, _ = write_shared(WEIGHTS)
    assert path.is_file()
    refusal = errno.ENOSPC
    with pytest.raises(PublishError, match="--shm-size"):
        write_shared(WEIGHTS)


def test_a_process_that_ends_by_itself_leaves_nothing(folder: Path) -> None:
    code = OTHER.replace("time.sleep(300)", "")
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)
    assert not list(folder.iterdir())


def test_who_lets_go_late_does_not_remove_what_others_made_in_its_place() -> None:
    late = SharedFolder("some")
    shutil.rmtree(late.path)  # by hand
    others = SharedFolder("some")
    late.close()
    assert others.path.is_dir()
    others.close()
    assert not others.path.exists()
