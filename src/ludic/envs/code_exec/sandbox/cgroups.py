"""A cgroup per worker, where version 2 is there and can be written to.

The kernel then counts the memory and the processes of the whole tree, and ends what goes beyond.
Elsewhere the worker's watch over its tree does that, a few hundredths of a second later.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ludic.envs.code_exec.sandbox.base import Limits

ROOT = Path("/sys/fs/cgroup")
"""Where version 2 is mounted. Elsewhere it has no controllers: those are then version 1's."""
PREFIX = "ludic-sandbox-"
_OWN_BYTES = 64 << 20
_OWN_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One control group. The launcher enters it, and removes it when the sandbox has ended."""

    path: Path

    @classmethod
    def create(cls, parent: Path | None = None) -> Cgroup | None:
        """Makes a new one below `parent`; returns None if this machine has no place for it."""
        parent = parent or writable_parent()
        if parent is None:
            return None
        path = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            path.mkdir()
        except OSError:
            return None
        return cls(path)

    def limit(self, limits: Limits) -> None:
        """Sets the limits of the next program; the worker's own needs are added."""
        memory = int(limits.memory_mb * 2**20) + int(limits.disk_mb * 2**20) + _OWN_BYTES
        self._write("memory.max", str(memory))
        with suppress(OSError):  # a kernel without swap accounting does not have it
            self._write("memory.swap.max", "0")
        self._write("pids.max", str(limits.processes + _OWN_PROCESSES))

    def kills(self) -> int:
        """How often the kernel has ended a process in it for want of memory."""
        lines = (self.path / "memory.events").read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))

    def remove(self, timeout_s: float = 2.0) -> None:
        """Ends what is in it, and removes it. Does nothing if it is gone already."""
        deadline = time.monotonic() + timeout_s
        while self.path.exists():
            with suppress(OSError):
                self._write("cgroup.kill", "1")
            with suppress(OSError):
                self.path.rmdir()
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def _write(self, name: str, value: str) -> None:
        (self.path / name).write_text(value)


def candidates(root: Path, own: str) -> Iterator[Path]:
    """This process's group, and those above it: new groups may go below any of them."""
    relative = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    if relative is None or ".." in relative:
        return
    place = root / relative.lstrip("/")
    for folder in (place, *place.parents):
        yield folder
        if folder == root:
            return


def fits(parent: Path) -> bool:
    """Whether groups below it get the controllers, and can be made: tries it."""
    probe = parent / f"{PREFIX}probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        controllers = (parent / "cgroup.subtree_control").read_text().split()
        if not {"memory", "pids"} <= set(controllers):
            return False
        probe.mkdir()
        Cgroup(probe).limit(Limits())
        # Moving a process needs the right to write here and in the group that it leaves.
        return os.access(probe / "cgroup.procs", os.W_OK) and os.access(
            parent / "cgroup.procs", os.W_OK
        )
    except OSError:
        return False
    finally:
        with suppress(OSError):
            probe.rmdir()


@cache
def writable_parent() -> Path | None:
    """Returns the group below which this machine lets us make others, or None. Groups
    that a killed process left behind, empty by now, are removed."""
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    parent = next((place for place in candidates(ROOT, own) if fits(place)), None)
    if parent is not None:
        for stale in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):  # one with processes in it cannot be removed
                stale.rmdir()
    return parent
