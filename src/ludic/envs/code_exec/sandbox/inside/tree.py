"""The processes of a program: which they are, what they use together, and how they are ended."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


def descendants() -> dict[int, list[str]]:
    """Every process below this one, with the fields of /proc/PID/stat from the third on: the
    state, the parent, …"""
    stats: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, LookupError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].decode().split()
                stats[int(name)] = fields
                children.setdefault(int(fields[1]), []).append(int(name))
    below: dict[int, list[str]] = {}
    fresh = [os.getpid()]
    while fresh:
        fresh = [child for pid in fresh for child in children.get(pid, [])]
        below.update((pid, stats[pid]) for pid in fresh)
    return below


def usage(own_bytes: int) -> dict[str, Any]:
    """What the program's processes use together. Pages that several share count for each, but
    not the `own_bytes` that each has from the process that it was forked from."""
    memory, cpu, tasks = 0, 0.0, 0
    for pid, fields in descendants().items():
        with suppress(OSError, ValueError, LookupError):
            threads = int(fields[17])
            if fields[0] in "ZX" and threads < 2:
                continue
            cpu += sum(map(int, fields[11:15])) / TICKS
            tasks += threads
            memory += max(0, _memory(pid) - own_bytes)
    return {"memory": memory, "cpu": cpu, "tasks": tasks}


def own_bytes() -> int:
    """This process's own memory, which every fork of it seems to have too."""
    return _memory(os.getpid())


def _memory(pid: int) -> int:
    """Asks a thread: a process whose first one has ended still has memory, and shows none."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/task/{thread}/status", "rb") as file:
                lines = [line.split() for line in file if line.startswith((b"RssAn", b"RssSh"))]
            if lines:
                return sum(int(words[1]) for words in lines) * 1024
    return 0


def tasks_of_user() -> int:
    """How many processes and threads this user has, on the whole system."""
    uid, tasks = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if os.stat(f"/proc/{name}/task/{name}").st_uid == uid or name == str(os.getpid()):
                    tasks += len(os.listdir(f"/proc/{name}/task"))
    return tasks


def kill(first: int = 0) -> None:
    """Ends every process below this one, and returns when none is left. With its `first` process,
    the kernel ends all of a PID namespace."""
    deadline = time.monotonic() + 10.0
    if first:
        _kill(first)
        pidfd, ended = os.pidfd_open(first), select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll(10_000)
        os.close(pidfd)
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = descendants()
        if not alive:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {list(alive)[:8]} cannot be ended")
        for pid in alive:
            _kill(pid)
        time.sleep(0.0005)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
