"""The host's end of a worker, and what the sandboxes around one have in common.

A worker starts its template, has it fork, and talks to each fork alone.
The template gets its settings and, for each program, a descriptor. What a program is given and
what it answers goes over that program's own socket, which only its supervisor holds.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from ludic.envs.code_exec.sandbox.base import (
    MAX_INPUT_BYTES,
    MAX_LINE,
    Limits,
    RunResult,
    RunStatus,
    SandboxError,
    SandboxUnavailableError,
    text_of,
)
from ludic.envs.code_exec.sandbox.inside import LOADER, OWN_PID, sources
from ludic.errors import ConfigError, SerializationError
from ludic.workers.frames import Frames

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

_SIGXCPU = 24


class _Head(msgspec.Struct, frozen=True):
    """What the supervisor says of a program's end; `stdout` is how much of what follows that is."""

    stopped: Literal["wall_time", "cpu_time", "memory", "processes", "output", "killed"] | None
    exit_code: int | None
    wall_s: float
    cpu_s: float
    stdout: Annotated[int, msgspec.Meta(ge=0)]


_HEAD = msgspec.json.Decoder(_Head)


_starting = threading.Lock()
_starters: dict[int, ThreadPoolExecutor] = {}
"""The one thread that starts every worker of this process, by the process: a fork has none yet."""


def _popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A sandbox dies with the thread that started it (that is what the kernel's parent-death signal
    means by parent), so that thread must live as long as the process does."""
    with _starting:
        if os.getpid() not in _starters:
            _starters[os.getpid()] = ThreadPoolExecutor(1, thread_name_prefix="ludic-sandbox")
        starting = _starters[os.getpid()].submit(lambda: subprocess.Popen(command, **options))
    return starting.result(timeout=START_S)


class WorkerProcess:
    """One worker. Only one thread at a time may use it; `close` may be called from any."""

    def __init__(
        self, command: Sequence[str], settings: Mapping[str, Any], *, pass_fds: Sequence[int] = ()
    ) -> None:
        self.broken: str | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._program: Frames | None = None
        # To a file, so that nobody has to read it: what a sandbox says when it cannot start.
        self._errors = os.memfd_create("ludic-sandbox-errors", os.MFD_CLOEXEC)
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_S)
        with theirs:
            self._child = _popen(
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
        modules = sources("confine", "tree", "program", "supervisor")
        settings = {**settings, "own_pid": OWN_PID}
        order = {"modules": modules, "main": list(modules)[-1], "settings": settings}
        first = json.dumps(order).encode()
        try:
            self._control.sendall(len(first).to_bytes(4, "big") + first)
            if self._control.recv(1) != b"H":
                raise EOFError("the worker closed its socket")
        except TimeoutError as error:
            raise self._break("waited too long for a sandbox to start") from error
        except (OSError, EOFError) as error:
            raise self._break("the sandbox's worker is gone") from error

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
        blobs = [*files.items(), ("", stdin)]
        sizes = [(name, len(content)) for name, content in blobs]
        given = limits.as_json()
        task = {"command": list(command), "limits": given, "interactive": interactive}
        head = json.dumps({**task, "blobs": sizes}).encode()
        parts = [len(head).to_bytes(4, "big"), head, *(content for _, content in blobs)]
        self.end_s = time.monotonic() + limits.wall_s + SLACK_S
        ours, theirs = socket.socketpair()
        self._program = Frames(ours, 2 * int(given["output_bytes"]) + (1 << 20))
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
        assert self._program is not None
        try:
            frame = self._program.receive(min(deadline, self.end_s))
        except TimeoutError as error:
            if deadline < self.end_s:
                return None
            raise self._break("waited too long for a program to end") from error
        except SerializationError as error:
            raise self._break("the sandbox's worker sent more than it may") from error
        except (OSError, EOFError, ValueError) as error:
            raise self._break("the sandbox's worker is gone") from error
        kind, content = frame[:1], frame[1:]
        if kind == b"O":
            return content
        self._program.close()
        self._program = None
        if kind == b"X":
            raise SandboxError(f"the sandbox failed: {content.decode('utf-8', 'replace')}")
        try:
            return _result(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._break("the sandbox's worker sent something that is not a result") from error

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
        if self._program is not None:
            self._program.close()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up
        self._control.close()
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
        assert self._program is not None
        deadline = min(self.end_s, time.monotonic() + START_S)
        try:
            self._program.send(kind, *parts, deadline=deadline)
        except (BrokenPipeError, ConnectionResetError):
            return
        except TimeoutError as error:
            raise self._break("waited too long for a sandbox to take its input") from error
        except (OSError, ValueError) as error:
            raise self._break("the sandbox's worker is gone") from error

    def _break(self, why: str) -> SandboxError:
        """Marks the worker as useless. Its last output may say why."""
        if self.broken is None:
            self.broken = why
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=0.2)
        stderr = ""
        with suppress(OSError, ValueError):
            stderr = text_of(os.pread(self._errors, 2000, 0))
        return SandboxError(f"{self.broken}: {stderr}" if stderr else self.broken)


def check_request(files: Mapping[str, bytes], command: Sequence[str], stdin: bytes) -> None:
    """Raises `ConfigError` for a request that no sandbox can run."""
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
    head = _HEAD.decode(content[4:end])
    middle = end + head.stdout
    stdout, stderr = content[end:middle], content[middle:]
    code = head.exit_code
    if head.stopped is not None:
        status, code = RunStatus(head.stopped), None
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
    return RunResult(status, code, stdout, stderr, head.wall_s, head.cpu_s)


class Sandbox(ABC):
    """Runs programs one after another, each as if it were the first. All calls block."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None

    @abstractmethod
    def start_worker(self) -> WorkerProcess:
        """Returns a fresh worker; raises `SandboxError` if it does not start."""

    def before_run(self, limits: Limits) -> None:
        """Called before each program."""
        return

    def after_run(self, result: RunResult) -> RunResult:
        """Called with what the worker said of a program."""
        return result

    @property
    def worker_pid(self) -> int | None:
        return None if self._worker is None else self._worker.pid

    def start(self) -> None:
        """Makes it ready; `SandboxUnavailableError` where the machine does not allow it."""
        if self._worker is not None and self._worker.broken is None:
            return
        self.close()
        self._worker = self.start_worker()

    def run(
        self,
        files: Mapping[str, bytes],
        command: Sequence[str],
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> RunResult:
        """Runs one program. `files` are in its working folder; `command[0]` may be "python"."""
        check_request(files, command, stdin)
        limits = limits or Limits()
        worker = self._ready()
        try:
            self.before_run(limits)
            worker.begin(files, command, stdin, limits, interactive=False)
            return self.after_run(worker.result())
        finally:
            self.put_back(worker)

    def open(
        self, files: Mapping[str, bytes], command: Sequence[str], limits: Limits | None = None
    ) -> Program:
        """Starts one program to talk to. The sandbox is busy until it is finished or killed."""
        check_request(files, command, b"")
        limits = limits or Limits()
        worker = self._ready()
        self.before_run(limits)
        worker.begin(files, command, b"", limits, interactive=True)
        return Program(self, worker)

    def close(self) -> None:
        """Ends everything that runs in it, and leaves nothing behind. Safe to call again."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def put_back(self, worker: WorkerProcess) -> None:
        """After a program: a worker that is broken is ended."""
        if worker.busy or worker.broken is not None:
            worker.close()
            if self._worker is worker:
                self._worker = None

    def _ready(self) -> WorkerProcess:
        self.start()
        assert self._worker is not None
        if self._worker.busy:
            raise SandboxError("the sandbox runs a program already: it takes one at a time")
        return self._worker

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Program:
    """A program that runs while one talks to it. For one thread at a time."""

    def __init__(self, sandbox: Sandbox, worker: WorkerProcess) -> None:
        self._sandbox, self._worker = sandbox, worker
        self._lines = bytearray()
        self._result: RunResult | None = None

    def send(self, data: bytes) -> None:
        """Adds to its standard input."""
        if self._result is None:
            self._worker.tell(b"I", data)

    def receive_line(self, timeout_s: float, max_bytes: int = MAX_LINE) -> bytes | None:
        """The next line of its standard output, with its end; None when the program has ended,
        `TimeoutError` when neither happened in time. A line longer than `max_bytes` comes cut:
        without its end."""
        deadline = time.monotonic() + timeout_s
        searched = 0
        while True:
            end = self._lines.find(b"\n", searched)
            if end >= 0 or len(self._lines) > max_bytes:
                cut = min(end + 1 or max_bytes, max_bytes)
                line = bytes(self._lines[:cut])
                del self._lines[:cut]
                return line
            if self._result is not None:
                return None
            searched = len(self._lines)
            got = self._read(deadline)
            if got is None:
                raise TimeoutError(f"no line of output within {timeout_s:g} s")
            self._lines += got

    def finish(self) -> RunResult:
        """Ends its input, waits for its end, and returns how it ended. Output that was not
        received by then is dropped."""
        return self._ended(b"E")

    def kill(self) -> RunResult:
        """Ends it at once."""
        return self._ended(b"K")

    def _ended(self, kind: bytes) -> RunResult:
        if self._result is None:
            self._worker.tell(kind)
        while self._result is None:
            self._read(self._worker.end_s)
        return self._result

    def _read(self, deadline: float) -> bytes | None:
        try:
            got = self._worker.read(deadline)
        except SandboxError:
            self._sandbox.put_back(self._worker)
            raise
        if isinstance(got, RunResult):
            self._result = self._sandbox.after_run(got)
            self._sandbox.put_back(self._worker)
            return b""
        return got


def probe(sandbox: Sandbox) -> None:
    """Starts the sandbox and runs one program; `SandboxUnavailableError` says what is wrong."""
    try:
        with sandbox:
            result = sandbox.run({"main.py": b"print(6 * 7)"}, ["python", "main.py"])
    except (SandboxError, OSError) as error:
        raise SandboxUnavailableError(str(error)) from error
    if result.status is not RunStatus.OK or result.stdout != b"42\n":
        stderr = text_of(result.stderr, 500)
        raise SandboxUnavailableError(f"printing 42 ended with {result.status}: {stderr}")
