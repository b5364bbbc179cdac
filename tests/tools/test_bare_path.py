"""The tests of a fresh machine see no program that it does not have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.bare_path import link_programs


def program(folder: Path, name: str, says: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {says or name}\n")
    path.chmod(0o755)
    return path


def test_every_program_is_linked_but_the_hidden_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for name in ("git", "bwrap", "redis-server", "redis-cli", "redis-check-aof"):
        program(first, name)
    for name in ("chromium", "chromium-browser", "chromedriver", "google-chrome-stable", "redis"):
        program(second, name)
    program(second, "git", "another")
    (first / "notes.txt").write_text("not a program")
    path = os.pathsep.join([str(first), str(tmp_path / "none"), "", str(second), str(first)])
    link_programs(tmp_path / "bare", path)
    assert sorted(os.listdir(tmp_path / "bare")) == ["git", "redis"]
    said = subprocess.run([tmp_path / "bare" / "git"], capture_output=True, text=True, check=True)
    assert said.stdout == "git\n", "the first on the path"


def test_on_this_machine_only_the_hidden_ones_are_missed(tmp_path: Path, repo_root: Path) -> None:
    bare = tmp_path / "bare"
    made = subprocess.run(
        [sys.executable, "-m", "tools.bare_path", bare],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() == str(bare)
    for name in ("sh", "env", "ls"):
        assert shutil.which(name, path=str(bare)) is not None
    for name in ("bwrap", "redis-server", "redis-cli", "chromium", "google-chrome", "rustc"):
        assert shutil.which(name, path=str(bare)) is None


def test_nothing_finds_the_hidden_programs_in_another_way(repo_root: Path) -> None:
    """They are looked for on the PATH alone: a place that is written down would not be hidden."""
    for folder in ("src", "tests", "tools", "benchmarks"):
        for path in (repo_root / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for name in ("bwrap", "redis-server", "chromium", "google-chrome"):
                assert f"/bin/{name}" not in text, path
