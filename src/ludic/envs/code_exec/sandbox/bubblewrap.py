"""Programs in namespaces of their own, made by bubblewrap: the default on Linux.

Inside there is no network, the system's folders can only be read, and nothing of the home, of /etc
beyond the linker's files, or of this process is there at all. A template waits inside; each program
is started from a fork of it, in further user, mount, PID and IPC namespaces with an empty folder
and a seccomp filter, and all of that is thrown away afterwards.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from ludic.envs.code_exec.sandbox.base import Limits, RunResult, RunStatus, SandboxUnavailableError
from ludic.envs.code_exec.sandbox.cgroups import Cgroup
from ludic.envs.code_exec.sandbox.inside import LOADER, sources
from ludic.envs.code_exec.sandbox.seccomp import FilterFor, build_filter
from ludic.envs.code_exec.sandbox.worker import (
    BOOTSTRAP,
    WORKER_ENVIRONMENT,
    Sandbox,
    WorkerProcess,
    probe,
)

FOLDER = "/tmp"
"""Where a program starts, and the only place that it can write to."""

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_OWN_RANGE, _PER_PROCESS = 1_800_000_000, 64
_NOBODY = 65534

_counter = count()


class BubblewrapSandbox(Sandbox):
    """A sandbox that holds: see the module."""

    name: ClassVar[str] = "bubblewrap"

    def __init__(self) -> None:
        super().__init__()
        self._cgroup: Cgroup | None = None
        self._kills = 0

    def start_worker(self) -> WorkerProcess:
        self._cgroup = Cgroup.create()
        filter_r, filter_w = os.pipe()
        try:
            with os.fdopen(filter_w, "wb") as pipe:
                pipe.write(build_filter("worker"))
            settings = worker_settings("bubblewrap", FOLDER, "program")
            return WorkerProcess(self._command(filter_r), settings, pass_fds=[filter_r])
        except BaseException:
            if self._cgroup is not None:
                self._cgroup.remove()
            raise
        finally:
            os.close(filter_r)

    def before_run(self, limits: Limits) -> None:
        if self._cgroup is not None:
            self._cgroup.limit(limits)
            self._kills = self._cgroup.kills()

    def after_run(self, result: RunResult) -> RunResult:
        if self._cgroup is not None and self._cgroup.kills() > self._kills:
            return replace(result, status=RunStatus.MEMORY, exit_code=None)
        return result

    def _command(self, filter_fd: int) -> list[str]:
        bwrap, python = find_bubblewrap(), interpreter()
        uid = spare_user()
        prefix, binds = reachable_prefix(python, uid)
        command = [
            bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session",
            "--hostname", "sandbox", "--uid", "1000", "--gid", "1000", "--clearenv",
        ]  # fmt: skip
        for name, value in WORKER_ENVIRONMENT.items():
            command += ["--setenv", name, value]
        for path in _SYSTEM:
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                command += ["--ro-bind", path, path]
        for path in _ETC:
            if os.path.exists(path):
                command += ["--ro-bind", path, path]
        if not python.prefix.startswith("/usr/") and python.prefix != "/usr":
            command += ["--ro-bind", prefix, python.prefix]
        command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        command += ["--dir", FOLDER, "--remount-ro", "/", "--chdir", FOLDER]
        command += ["--seccomp", str(filter_fd), "--"]
        command += [python.executable, "-s", "-X", "utf8", "-c", BOOTSTRAP]
        if uid is None and self._cgroup is None:
            return command
        return launched(command, uid, binds, self._cgroup)


def worker_settings(mode: str, folder: str, purpose: FilterFor) -> dict[str, Any]:
    """What a worker is told of its programs: where they start, and what they may and find."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
    rules = build_filter(purpose).hex()
    return {"mode": mode, "folder": folder, "filter": rules, "environment": environment}


def launched(
    command: list[str], uid: int | None, binds: list[tuple[str, str]], cgroup: Cgroup | None
) -> list[str]:
    """The command behind a launcher that gives up root first, and looks after the cgroup."""
    modules = sources("confine", "launch")
    group = None if cgroup is None else str(cgroup.path)
    settings = {"command": command, "uid": uid, "binds": binds, "cgroup": group}
    start = f"{LOADER}\nload({modules!r})\nsys.modules[{list(modules)[-1]!r}].main()\n"
    return [interpreter().executable, "-I", "-S", "-c", start, json.dumps(settings)]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python that programs run with: where it is, and what must be readable for it."""

    executable: str
    prefix: str


def spare_user() -> int | None:
    """A user id that owns nothing, one per worker. None where this process is not root, or only
    in a user namespace without other users: it is then an ordinary user outside."""
    if os.geteuid() != 0:
        return None
    wanted = _OWN_RANGE + os.getpid() % 4_194_304 * _PER_PROCESS + next(_counter) % _PER_PROCESS
    ranges = [
        tuple(map(int, line.split()))
        for line in Path("/proc/self/uid_map").read_text().splitlines()
    ]
    for uid in (wanted, _NOBODY):
        if any(first <= uid < first + length for first, _, length in ranges):
            return uid
    return None


def interpreter() -> Interpreter:
    """The Python that this one's virtual environment was made from: without its packages."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return Interpreter(executable, os.path.realpath(sys.base_prefix))


def reachable_prefix(python: Interpreter, uid: int | None) -> tuple[str, list[tuple[str, str]]]:
    """Returns where `uid` finds the interpreter, and what the launcher binds to get it there."""
    if uid is None or readable_by_all(python.prefix):
        return python.prefix, []
    return "/mnt/python", [(python.prefix, "/mnt/python")]


def readable_by_all(path: str) -> bool:
    """Whether any user can get to `path`: every folder above it can be passed."""
    place = Path(path)
    try:
        return all(folder.stat().st_mode & 0o001 for folder in (place, *place.parents))
    except OSError:
        return False


def find_bubblewrap() -> str:
    """Returns where the program is; raises `SandboxUnavailableError` if it is not installed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailableError(
            "the sandbox 'bubblewrap' needs the program bwrap, which is not on this machine: "
            "install the system's package bubblewrap (apt-get install bubblewrap)"
        )
    return bwrap


def bubblewrap_version() -> str:
    output = subprocess.run(
        [find_bubblewrap(), "--version"], capture_output=True, text=True, timeout=20, check=False
    ).stdout
    match = re.search(r"\d+(\.\d+)+", output)
    return match[0] if match else "of unknown version"


@functools.cache
def check_bubblewrap() -> None:
    """Tries it, once per process; `SandboxUnavailableError` says why it cannot be used."""
    if sys.platform != "linux":
        raise SandboxUnavailableError("the sandbox 'bubblewrap' needs Linux")
    find_bubblewrap()
    try:
        probe(BubblewrapSandbox())
    except SandboxUnavailableError as error:
        raise SandboxUnavailableError(
            f"the sandbox 'bubblewrap' does not work on this machine: {error}. {_hint()}"
        ) from error


def _hint() -> str:
    """What to do about the usual reasons."""
    for setting, wanted in (
        ("kernel/unprivileged_userns_clone", "1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "0"),
    ):
        path = Path("/proc/sys", setting)
        if path.exists() and path.read_text().strip() != wanted:
            name = setting.replace("/", ".")
            return f"User namespaces are not allowed here: `sysctl -w {name}={wanted}` allows them"
    maximum = Path("/proc/sys/user/max_user_namespaces")
    if maximum.exists() and maximum.read_text().strip() == "0":
        return "User namespaces are not allowed here: raise user.max_user_namespaces"
    return (
        "It needs user namespaces, which containers often forbid: start the container with "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined, or as privileged"
    )
