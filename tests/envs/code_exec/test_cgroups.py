"""Cgroups: where they are looked for, what is written to them, and that they are removed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ludic.envs.code_exec.sandbox.base import Limits, RunStatus
from ludic.envs.code_exec.sandbox.bubblewrap import BubblewrapSandbox
from ludic.envs.code_exec.sandbox.cgroups import ROOT, Cgroup, candidates, fits


def version_2() -> Path | None:
    """Where groups of version 2 are on this machine, be it without controllers."""
    places = (ROOT, ROOT / "unified")
    return next((place for place in places if (place / "cgroup.procs").is_file()), None)


def test_the_own_group_comes_first_and_then_those_above_it() -> None:
    root = Path("/sys/fs/cgroup")
    own = "3:cpu:/x\n0::/user.slice/app\n"
    assert list(candidates(root, own)) == [root / "user.slice/app", root / "user.slice", root]
    assert list(candidates(root, "0::/\n")) == [root]
    assert list(candidates(root, "0::/../outside\n")) == []
    assert list(candidates(root, "3:cpu:/x\n")) == []


def test_a_place_without_the_controllers_does_not_fit(tmp_path: Path) -> None:
    assert not fits(tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    assert not fits(tmp_path)


def test_the_limits_count_the_worker_and_the_files_too(tmp_path: Path) -> None:
    group = Cgroup.create(tmp_path)
    assert group is not None
    group.limit(Limits(memory_mb=100, disk_mb=10, processes=5))
    assert (group.path / "memory.max").read_text() == str((100 + 10 + 64) << 20)
    assert (group.path / "memory.swap.max").read_text() == "0"
    assert (group.path / "pids.max").read_text() == "21"
    (group.path / "memory.events").write_text("low 0\noom 1\noom_kill 3\n")
    assert group.kills() == 3


def test_no_group_is_made_where_it_cannot_be(tmp_path: Path) -> None:
    assert Cgroup.create(tmp_path / "missing") is None


@pytest.mark.integration
def test_a_real_group_is_entered_and_removed_with_its_processes() -> None:
    root = version_2()
    group = Cgroup.create(root) if root is not None else None
    if group is None:
        pytest.skip("no cgroup of version 2 can be made on this machine")
    child = subprocess.Popen(["sleep", "60"])
    try:
        (group.path / "cgroup.procs").write_text(str(child.pid))
        assert (group.path / "cgroup.procs").read_text().split() == [str(child.pid)]
        child.kill()
        child.wait(timeout=10)
        group.remove()
        assert not group.path.exists()
    finally:
        child.kill()
        child.wait(timeout=10)
        group.remove()


@pytest.mark.integration
@pytest.mark.sandbox
def test_a_sandbox_runs_in_its_group_and_takes_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    root = version_2()
    probe = Cgroup.create(root) if root is not None else None
    if probe is None:
        pytest.skip("no cgroup of version 2 can be made on this machine")
    probe.remove()
    made: list[Cgroup] = []

    def create() -> Cgroup | None:
        found = real(root)
        assert found is not None
        made.append(found)
        return found

    real = Cgroup.create
    kills = [0]
    monkeypatch.setattr(Cgroup, "create", staticmethod(create))
    # The controllers may belong to version 1 here: only the group itself is real.
    monkeypatch.setattr(Cgroup, "limit", lambda self, limits: None)
    monkeypatch.setattr(Cgroup, "kills", lambda self: kills[0])
    with BubblewrapSandbox() as sandbox:
        program = sandbox.open({"main.py": b"input()"}, ["python", "main.py"])
        members = (made[0].path / "cgroup.procs").read_text().split()
        assert len(members) >= 3, "bubblewrap, its init process, the template"
        kills[0] = 1  # the kernel has ended a process for want of memory
        assert program.kill().status is RunStatus.MEMORY
    deadline = time.monotonic() + 20
    while made[0].path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not made[0].path.exists()
