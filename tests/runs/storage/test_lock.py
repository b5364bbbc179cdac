"""One process at a time in a run folder; who is gone does not hold it."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.runs.storage import LOCK, locked

HOLD = """
import pathlib, sys, time
from ludic.runs.storage import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_error_names_the_process_that_holds_the_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(ConfigError, match=rf"process {os.getpid()} on host {platform.node()} since"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):  # free again
        pass


def test_the_lock_of_a_killed_process_is_taken(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} "), locked(tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=60)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def written(folder: Path, **facts: object) -> None:
    holder = {"pid": 7, "host": platform.node(), "boot": "before", "since": "2026-01-01 00:00:00"}
    (folder / LOCK).write_text(json.dumps({**holder, **facts}))


def test_a_lock_from_before_a_reboot_is_taken(tmp_path: Path) -> None:
    written(tmp_path)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_of_another_host_holds_and_says_what_to_do(tmp_path: Path) -> None:
    written(tmp_path, host="elsewhere")
    with (
        pytest.raises(ConfigError, match=r"process 7 on host elsewhere since .* remove .*\.lock"),
        locked(tmp_path),
    ):
        pass
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}"])
def test_a_lock_file_that_says_nothing_holds_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with locked(tmp_path):
        pass
