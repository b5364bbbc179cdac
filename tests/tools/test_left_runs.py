"""Tests that leave run folders in the checkout fail the session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from pathlib import Path
from tests.left_runs import LeftRuns

def pytest_configure(config):
    config.pluginmanager.register(LeftRuns(Path(__file__).parent / "runs"))
"""
LEAVES = """
from pathlib import Path

def test_it():
    folder = Path(__file__).parent / "runs" / "left"
    {does}
"""


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(
    ("does", "left"), [("folder.mkdir(parents=True)", True), ("assert folder", False)]
)
def test_the_session_fails_only_if_a_folder_is_left(
    tmp_path: Path, repo_root: Path, processes: int, does: str, left: bool
) -> None:
    (tmp_path / "runs" / "earlier").mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(LEAVES.format(does=does), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "-c", "/dev/null"]
    command += ["-p", "no:cacheprovider", "-o", f"pythonpath={repo_root}"]
    command += ["--import-mode=importlib", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == (1 if left else 0), done.stdout
    assert ("FAILED: tests left left in" in done.stdout) is left
