"""The processes of a program: which they are, what they use together, and how they are ended."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any


def others(mode: str) -> list[int]:
    """The processes of the program. In a sandbox they are all but the worker and the first; on
    the plain system, the worker's descendants."""
    own = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if mode != "plain":
        return [pid for pid in pids if pid not in (1, own)]
    children: dict[int, list[int]] = {}
    for pid in pids:
        with suppress(OSError, ValueError, LookupError):
            children.setdefault(int(_stat(pid)[1]), []).append(pid)
    found: list[int] = []
    fresh = [own]
    while fresh:
        fresh = [child for pid in fresh for child in children.get(pid, [])]
        found += fresh
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: the state, the parent, …"""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def usage(mode: str) -> dict[str, Any]:
    """What the program's processes use together. Pages that several share count for each."""
    memory, cpu, tasks = 0, 0.0, 0
    for pid in others(mode):
        with suppress(OSError, ValueError, LookupError):
            fields = _stat(pid)
            if fields[0] in "ZX":
                continue
            cpu += sum(map(int, fields[11:15])) / TICKS
            tasks += int(fields[17])
            with open(f"/proc/{pid}/status", "rb") as file:
                rows = dict(line.split(b":", 1) for line in file if b":" in line)
            used = sum(int(rows[key].split()[0]) for key in (b"RssAnon", b"RssShmem"))
            memory += max(0, used * 1024 - OWN_BYTES)
    return {"memory": memory, "cpu": cpu, "tasks": tasks}


def tasks_of_user() -> int:
    """How many processes and threads this user has, on the whole system."""
    uid, found = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if os.stat(f"/proc/{name}/task/{name}").st_uid == uid or name == str(os.getpid()):
                    found += len(os.listdir(f"/proc/{name}/task"))
    return found


def own_bytes() -> int:
    """This worker's own memory, which every fork of it seems to have too."""
    with open("/proc/self/status", "rb") as file:
        rows = dict(line.split(b":", 1) for line in file if b":" in line)
    return 1024 * int(rows[b"RssAnon"].split()[0])


def kill(mode: str, init: int) -> None:
    """Ends the program's processes, and returns when none is left."""
    if mode == "nested" and init:
        with suppress(ProcessLookupError):
            os.kill(init, signal.SIGKILL)  # the kernel ends its whole namespace with it
    deadline = time.monotonic() + 10.0
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = others(mode)
        if not left:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left[:8]} cannot be ended")
        if mode != "nested":
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)


TICKS = os.sysconf("SC_CLK_TCK")
OWN_BYTES = own_bytes()
