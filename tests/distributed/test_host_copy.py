"""The copy of the weights that a host keeps: made once, changed in place, never half."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ludic.distributed import shared_folders
from ludic.distributed.differences import encode_all
from ludic.distributed.host_copy import HostCopy
from ludic.distributed.shared_folders import OwnedFolder
from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.vllm.shared_memory import write_shared
from ludic.distributed.weights_file import fill_file, layout_of, make_file, map_file
from ludic.errors import DeadlineError, PublishError

KEY = "0123456789abcdef"
OLD = {"a": torch.arange(60.0).view(6, 10), "b": torch.ones(7, dtype=torch.bfloat16)}
NEW = {"a": OLD["a"].clone(), "b": torch.full((7,), -0.0, dtype=torch.bfloat16)}
NEW["a"][3, 3] = torch.nan

OTHER = """
import os, signal, sys, torch
from pathlib import Path
from ludic.distributed import host_copy
from ludic.distributed import shared_folders
shared_folders.shared_folder = lambda: Path(sys.argv[1])
copy = host_copy.HostCopy(sys.argv[2])
if sys.argv[3] == "die":
    host_copy.apply_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    copy.bring("2", {}, base="1")
print(copy.holds, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    monkeypatch.setattr(shared_folders, "shared_folder", lambda: tmp_path)
    return tmp_path


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return receipt(one.items()) == receipt(other.items())


def other_process(folder: Path, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER, str(folder), KEY, what]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ})


def test_a_file_that_is_filled_in_later_is_a_safetensors_file(folder: Path) -> None:
    tensors = {**OLD, "empty": torch.ones(0, 3), "one": torch.tensor(2.0), "n": torch.arange(3)}
    make_file(folder / "made", layout_of(tensors))
    parts = [(name, tensor, 0) for name, tensor in tensors.items() if name != "a"]
    rows = [("a", tensors["a"][4:], 4), ("a", tensors["a"][:4], 0)]
    fill_file(folder / "made", parts + rows)
    assert same(load_file(folder / "made"), tensors)
    save_file(tensors, folder / "saved")
    assert same(map_file(folder / "saved"), tensors)


def test_a_difference_is_applied_to_the_copy_and_whoever_comes_second_finds_it_made() -> None:
    first, second = HostCopy(KEY), HostCopy(KEY)
    assert first.holds is None
    assert same(first.bring("1", OLD), OLD)
    assert second.holds == "1"
    assert same(second.bring("1", {}), OLD)
    difference = encode_all(OLD, NEW)
    assert same(second.bring("2", difference, base="1"), NEW)
    assert same(first.bring("2", difference, base="1"), NEW)
    assert first.receipt() == receipt(NEW.items())


def test_a_difference_to_something_else_is_refused_and_changes_nothing() -> None:
    copy = HostCopy(KEY)
    with pytest.raises(PublishError, match=r"is None, and .* against 1"):
        copy.bring("2", {}, base="1")
    copy.bring("1", OLD)
    with pytest.raises(PublishError, match=f"{os.uname().nodename} is 1, .* against 7"):
        copy.bring("8", encode_all(OLD, NEW), base="7")
    assert copy.holds == "1"
    assert same(copy.bring("1", {}), OLD)


def test_a_file_in_shared_memory_is_kept_and_not_copied() -> None:
    path, owner = write_shared(OLD)
    copy = HostCopy(KEY)
    inode = path.stat().st_ino
    copy.bring("1", OLD, file=path)
    owner.close()
    assert not path.exists()
    assert (copy._folder.path / "weights.safetensors").stat().st_ino == inode
    assert same(copy.bring("1", {}), OLD)


def test_who_has_mapped_the_old_copy_reads_on_when_a_whole_one_replaces_it() -> None:
    copy = HostCopy(KEY)
    old = copy.bring("1", OLD)
    assert same(copy.bring("2", NEW), NEW)
    assert same(old, OLD)


def test_one_that_is_killed_while_it_writes_leaves_no_copy_to_add_to(folder: Path) -> None:
    copy = HostCopy(KEY)
    copy.bring("1", OLD)
    assert other_process(folder, "die").wait(60) == -signal.SIGKILL
    assert copy.holds is None
    with pytest.raises(PublishError, match="is None"):
        copy.bring("2", encode_all(OLD, NEW), base="1")
    assert same(copy.bring("3", NEW), NEW)


def test_a_difference_that_cannot_be_applied_leaves_no_copy_to_add_to() -> None:
    copy = HostCopy(KEY)
    copy.bring("1", OLD)
    with pytest.raises(ValueError, match="a: 3 bytes are no difference"):
        copy.bring("2", {"a": torch.ones(3, dtype=torch.uint8)}, base="1")
    assert copy.holds is None


def test_the_copy_goes_with_the_last_process_that_holds_it(folder: Path) -> None:
    copy = HostCopy(KEY)
    copy.bring("1", OLD)
    other = other_process(folder, "hold")
    assert other.stdout is not None
    assert other.stdout.readline() == "1\n"
    copy.close()
    again = HostCopy(KEY)
    assert again.holds == "1"
    again.close()
    other.kill()
    other.wait(60)
    assert list(folder.glob("*copy*"))
    OwnedFolder().close()  # whoever makes a folder removes what the dead left
    assert not list(folder.glob("*copy*"))
    HostCopy(KEY).close()
    assert not list(folder.iterdir())


def test_a_process_that_takes_too_long_is_not_waited_for() -> None:
    first, second = HostCopy(KEY), HostCopy(KEY)
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with first._folder.alone(60):
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    try:
        with pytest.raises(DeadlineError, match="another process to finish the copy"):
            second.bring("1", OLD, timeout_s=0.05)
    finally:
        go_on.set()
        thread.join()


def test_too_little_room_names_the_host_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = HostCopy(KEY)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(PublishError, match=rf"on {os.uname().nodename}.*publish without diff"):
        copy.bring("1", OLD)
    assert copy.holds is None


def test_a_key_that_is_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="is not the key"):
        HostCopy("../../etc")
