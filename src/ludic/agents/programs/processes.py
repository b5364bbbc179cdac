"""A program as a process: started with its own address and key, and ended with all it started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ludic.workers.watched_process import signal_group

HANDED_ON = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PYTHONPATH", "SHELL", "TERM", "TMPDIR"),
    *("TZ", "USER", "VIRTUAL_ENV"),
)
"""Variables of this process that every program gets; none should hold a secret."""

MAX_OUTPUT_BYTES = 1024 * 1024
_TAIL_BYTES = 4096
_GRACE_S = 2.0
"""How long a program may take to end by itself once it is told to."""
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. `status` is its exit status, negative for a signal, and None if it was
    ended at its deadline. Of its standard error only the end is kept."""

    status: int | None
    stdout: str
    stderr: str


def environment(variables: Mapping[str, str], pass_env: Sequence[str]) -> dict[str, str]:
    """What a program finds in its environment: harmless variables of this process, those of
    `pass_env`, and `variables`. `python` is the one that runs Ludic."""
    handed = {name: os.environ[name] for name in (*HANDED_ON, *pass_env) if name in os.environ}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "NO_PROXY": "127.0.0.1,localhost", **handed, **variables}


async def run_process(
    command: Sequence[str],
    *,
    stdin: str,
    env: Mapping[str, str],
    cwd: str | None,
    mark: str,
    timeout_s: float | None,
) -> Ended:
    """Runs a command to its end or its deadline. After that nothing of it is left: its process
    group is ended, and so is every process that has `mark` among its variables. Raises `OSError`
    where it cannot be started."""
    transport, process = await asyncio.get_running_loop().subprocess_exec(
        _Process, *command, env=dict(env), cwd=cwd, start_new_session=True
    )
    group = transport.get_pid()
    status: int | None = None
    try:
        given = transport.get_pipe_transport(0)
        assert isinstance(given, asyncio.WriteTransport)
        given.write(stdin.encode())
        given.close()  # once it is written
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await process.exited.wait()
            status = transport.get_returncode()
        if status is None:
            signal_group(group, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await process.exited.wait()
    finally:
        # Not on the loop: looking at every process of the machine takes a moment.
        await asyncio.to_thread(_end_all, group, mark)
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_S):
                await process.closed.wait()
        transport.close()
    return Ended(status, _text(process.out), _text(process.err))


class _Process(asyncio.SubprocessProtocol):
    """Collects what a process writes. Only the event loop comes here."""

    def __init__(self) -> None:
        self.out, self.err = bytearray(), bytearray()
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self.out += data[: MAX_OUTPUT_BYTES - len(self.out)]
        else:
            self.err += data
            del self.err[:-_TAIL_BYTES]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()


def _end_all(group: int, mark: str) -> None:
    """Kills the group and every process with the mark, until none is left or time is up."""
    deadline = time.monotonic() + _KILL_S
    signal_group(group, signal.SIGKILL)
    while time.monotonic() < deadline:
        alive = _marked(mark.encode())
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not alive:
            return
        time.sleep(0.005)


def _marked(mark: bytes) -> list[int]:
    """The processes of this machine with `mark` among their variables: a child inherits them even
    if it leaves its parent's group."""
    pids = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes():
                    pids.append(int(name))
    return pids


def _text(data: bytearray) -> str:
    return data.decode("utf-8", "replace")
