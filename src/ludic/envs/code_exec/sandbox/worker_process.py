"""The host's end of a worker: starts its template, has it fork, and talks to each fork alone.

The template gets its settings and, for each program, a descriptor. What a program is given and
what it answers goes over that program's own socket, which only its supervisor holds.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from ludic.envs.code_exec.sandbox.base import (
    MAX_INPUT_BYTES,
    Limits,
    RunResult,
    RunStatus,
    SandboxError,
)
from ludic.envs.code_exec.sandbox.inside import LOADER, OWN_PID, sources
from ludic.errors import ConfigError

START_S = 60.0
WORKER_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set does not change from worker to worker
    "MALLOC_ARENA_MAX": "2",  # else each thread reserves address space, which is limited
}
SLACK_S = 15.0
"""How much longer than a program's wall time its worker may take before it counts as broken."""
_REAP_S = 10.0

BOOTSTRAP = f"""\
{LOADER}
import json, os, site
def _read(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data
_first = json.loads(_read(int.from_bytes(_read(4), "big")))
sys.path[:] = [entry for entry in sys.path if entry]
load(_first["modules"])
sys.modules[_first["main"]].main(_first["settings"])
"""

_STOPPED = {
    "wall": RunStatus.WALL_TIME,
    "cpu": RunStatus.CPU_TIME,
    "memory": RunStatus.MEMORY,
    "processes": RunStatus.PROCESSES,
    "output": RunStatus.OUTPUT,
    "killed": RunStatus.KILLED,
}
_SIGXCPU = 24


class _Starter:
    """One thread that starts every worker of this process.

    A sandbox dies with the thread that started it (that is what the kernel's parent-death signal
    means by parent), so that thread must live as long as the process does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._pid = 0

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._thread is None or self._pid != os.getpid():
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="ludic-sandbox")
                self._pid = os.getpid()
            starting: Future[subprocess.Popen[bytes]] = self._thread.submit(
                lambda: subprocess.Popen(command, **options)
            )
        return starting.result(timeout=START_S)


_starter = _Starter()


class WorkerProcess:
    """One worker. Only one thread at a time may use it; `close` may be called from any."""

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.broken: str | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._program: socket.socket | None = None
        self._buffer = bytearray()
        self._max_frame = 0
        # To a file, so that nobody has to read it: what a sandbox says when it cannot start.
        self._errors = os.memfd_create("ludic-sandbox-errors", os.MFD_CLOEXEC)
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_S)
        with theirs:
            self._child = _starter.popen(
                command,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                env=WORKER_ENVIRONMENT,
                cwd="/",
            )
        atexit.register(self.close)
        try:
            self._hello(settings)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def busy(self) -> bool:
        """Whether a program runs, or its result has not been read."""
        return self._program is not None

    def _hello(self, settings: Mapping[str, Any]) -> None:
        modules = sources("confine", "tree", "program", "supervisor", "template")
        first = json.dumps(
            {
                "modules": modules,
                "main": list(modules)[-1],
                "settings": {**settings, "own_pid": OWN_PID},
            }
        ).encode()
        try:
            self._control.sendall(len(first).to_bytes(4, "big") + first)
            ready = self._control.recv(1) == b"H"
        except TimeoutError as error:
            raise self._break("waited too long for a sandbox to start") from error
        except OSError as error:
            raise self._break("the sandbox's worker is gone") from error
        if not ready:
            raise self._break("the sandbox's worker is gone")

    def begin(
        self,
        files: Mapping[str, bytes],
        command: Sequence[str],
        stdin: bytes,
        limits: Limits,
        *,
        interactive: bool,
    ) -> None:
        """Sends a program; `read` or `result` say what it does."""
        check_request(files, command, stdin)
        blobs = [*files.items(), ("", stdin)]
        given = limits.as_json()
        head = json.dumps(
            {
                "command": list(command),
                "limits": given,
                "interactive": interactive,
                "blobs": [(name, len(content)) for name, content in blobs],
            }
        ).encode()
        parts = [len(head).to_bytes(4, "big"), head, *(content for _, content in blobs)]
        self._buffer.clear()
        self._max_frame = 2 * int(given["output_bytes"]) + (1 << 20)
        self.end_s = time.monotonic() + limits.wall_s + SLACK_S
        self._program, theirs = socket.socketpair()
        self._program.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._control, [b"F"], [theirs.fileno()])
        except OSError as error:
            raise self._break("the sandbox's worker is gone") from error
        self._send(b"R", *parts)

    def tell(self, kind: bytes, content: bytes = b"") -> None:
        """More input (`I`), no more input (`E`), or the end (`K`), which it has little time for."""
        if kind == b"K":
            self.end_s = min(self.end_s, time.monotonic() + SLACK_S)
        self._send(kind, content)

    def read(self, deadline: float) -> bytes | RunResult | None:
        """Output of an interactive program, or its result; None when neither came in time."""
        got = self._frame(min(deadline, self.end_s), soft=deadline < self.end_s)
        if got is None:
            return None
        kind, content = got
        if kind == b"O":
            return content
        assert self._program is not None
        self._program.close()
        self._program = None
        if kind == b"X":
            raise SandboxError(f"the sandbox failed: {content.decode('utf-8', 'replace')}")
        return _result(content)

    def result(self) -> RunResult:
        """Waits for the end of a program that is not interactive."""
        got = self.read(self.end_s)
        if not isinstance(got, RunResult):
            raise self._break("the sandbox's worker sent output where a result was due")
        return got

    def close(self) -> None:
        """Ends the worker and all that runs under it."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.broken = self.broken or "it was closed"
        atexit.unregister(self.close)
        for end in (self._program, self._control):
            if end is not None:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up
                end.close()
        try:
            self._child.wait(timeout=_REAP_S if not self.busy else 0.5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=_REAP_S)
        os.close(self._errors)

    def _send(self, kind: bytes, *parts: bytes) -> None:
        """Supervisors take at once what they are sent. One that has ended meanwhile has said why,
        which is still to be read."""
        size = sum(map(len, parts)).to_bytes(4, "big")
        rest = memoryview(b"".join((kind, size, *parts)))
        deadline = min(self.end_s, time.monotonic() + START_S)
        try:
            while rest:
                self._wait(select.POLLOUT, deadline, "a sandbox to take its input")
                assert self._program is not None
                with suppress(BlockingIOError):
                    rest = rest[self._program.send(rest[: 1 << 20]) :]
        except (BrokenPipeError, ConnectionResetError):
            return
        except (OSError, ValueError) as error:
            raise self._break("the sandbox's worker is gone") from error

    def _frame(self, deadline: float, *, soft: bool) -> tuple[bytes, bytes] | None:
        while True:
            if len(self._buffer) >= 5:
                size = int.from_bytes(self._buffer[1:5], "big")
                if size > self._max_frame:
                    raise self._break("the sandbox's worker sent more than it may")
                if len(self._buffer) >= 5 + size:
                    frame = bytes(self._buffer[:1]), bytes(self._buffer[5 : 5 + size])
                    del self._buffer[: 5 + size]
                    return frame
            try:
                if not self._wait(select.POLLIN, deadline, "a program to end", soft=soft):
                    return None
                assert self._program is not None
                data = self._program.recv(1 << 20)
            except BlockingIOError:
                continue
            except (OSError, ValueError) as error:
                raise self._break("the sandbox's worker is gone") from error
            if not data:
                raise self._break("the sandbox's worker is gone")
            self._buffer += data

    def _wait(self, event: int, deadline: float, what: str, *, soft: bool = False) -> bool:
        assert self._program is not None
        poll = select.poll()
        poll.register(self._program, event)
        left = max(0.0, deadline - time.monotonic())
        if poll.poll(left * 1000):
            return True
        if soft:
            return False
        raise self._break(f"waited too long for {what}")

    def _break(self, why: str) -> SandboxError:
        """The worker is of no more use. What it last said may tell why."""
        if self.broken is None:
            self.broken = why
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=0.2)
        said = ""
        with suppress(OSError, ValueError):
            said = os.pread(self._errors, 2000, 0).decode("utf-8", "replace").strip()
        return SandboxError(f"{self.broken}: {said}" if said else self.broken)


def check_request(files: Mapping[str, bytes], command: Sequence[str], stdin: bytes) -> None:
    """`ConfigError` for a request that no sandbox can run."""
    if not command or not all(isinstance(part, str) and "\0" not in part for part in command):
        raise ConfigError(f"command={list(command)!r}: a program and its arguments, as text")
    for name in files:
        path = PurePosixPath(name)
        if not name or "\0" in name or path.is_absolute() or ".." in path.parts or name == ".":
            raise ConfigError(f"file {name!r}: must be a relative path below the working folder")
    total = len(stdin) + sum(map(len, files.values()))
    if total > MAX_INPUT_BYTES:
        raise ConfigError(f"{total} bytes of files and input; the limit is {MAX_INPUT_BYTES}")


def _result(content: bytes) -> RunResult:
    end = 4 + int.from_bytes(content[:4], "big")
    head = json.loads(content[4:end])
    middle = end + head["stdout"]
    stdout, stderr = content[end:middle], content[middle:]
    code: int | None = head["exit_code"]
    if head["stopped"] is not None:
        status, code = _STOPPED[head["stopped"]], None
    elif code == 0:
        status = RunStatus.OK
    elif code == -_SIGXCPU:
        status = RunStatus.CPU_TIME
    elif code is not None and code < 0:
        status = RunStatus.SIGNAL
    elif stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
        status = RunStatus.MEMORY  # one allocation that its address space had no room for
    else:
        status = RunStatus.ERROR
    return RunResult(
        status, code, stdout, stderr, head["wall_s"], head["cpu_s"], head["peak_bytes"] / 2**20
    )
