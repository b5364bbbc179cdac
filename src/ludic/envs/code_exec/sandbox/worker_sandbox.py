"""What the sandboxes have in common: a worker, kept warm, and a program to talk to."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import ClassVar, Self

from ludic.envs.code_exec.sandbox.base import (
    MAX_LINE,
    Limits,
    RunResult,
    RunStatus,
    SandboxError,
    SandboxUnavailableError,
)
from ludic.envs.code_exec.sandbox.worker_process import WorkerProcess, check_request


class WorkerSandbox:
    """A `Sandbox` around a `WorkerProcess`. With `warm=False`, every program gets a new worker."""

    name: ClassVar[str]

    def __init__(self, *, warm: bool = True) -> None:
        self.warm = warm
        self._worker: WorkerProcess | None = None

    @abstractmethod
    def start_worker(self) -> WorkerProcess:
        """A fresh worker; `SandboxError` where it does not come up."""

    def before_run(self, limits: Limits) -> None:
        """Called before each program."""

    def after_run(self, result: RunResult) -> RunResult:
        """Called with what the worker said of a program."""
        return result

    @property
    def broken(self) -> bool:
        """Whether its worker is gone; the next run starts another."""
        return self._worker is not None and self._worker.broken is not None

    @property
    def worker_pid(self) -> int | None:
        return None if self._worker is None else self._worker.pid

    def start(self) -> None:
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
    ) -> WorkerProgram:
        check_request(files, command, b"")
        limits = limits or Limits()
        worker = self._ready()
        self.before_run(limits)
        worker.begin(files, command, b"", limits, interactive=True)
        return WorkerProgram(self, worker)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def put_back(self, worker: WorkerProcess) -> None:
        """After a program: a worker that is broken or not to be used again is ended."""
        if worker.busy or worker.broken is not None or not self.warm:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class WorkerProgram:
    """The `Program` of a worker. For one thread at a time."""

    def __init__(self, sandbox: WorkerSandbox, worker: WorkerProcess) -> None:
        self._sandbox, self._worker = sandbox, worker
        self._lines = bytearray()
        self._result: RunResult | None = None

    def send(self, data: bytes) -> None:
        if self._result is None:
            self._worker.tell(b"I", data)

    def receive_line(self, timeout_s: float, max_bytes: int = MAX_LINE) -> bytes | None:
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
        if self._result is None:
            self._worker.tell(b"E")
        return self._wait()

    def kill(self) -> RunResult:
        if self._result is None:
            self._worker.tell(b"K")
        return self._wait()

    def _wait(self) -> RunResult:
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


def probe(sandbox: WorkerSandbox) -> None:
    """Starts the sandbox and runs one program; `SandboxUnavailableError` says what is wrong."""
    try:
        with sandbox:
            result = sandbox.run({"main.py": b"print(6 * 7)"}, ["python", "main.py"])
    except (SandboxError, OSError) as error:
        raise SandboxUnavailableError(str(error)) from error
    if result.status is not RunStatus.OK or result.stdout != b"42\n":
        said = result.stderr.decode("utf-8", "replace").strip()[-500:]
        raise SandboxUnavailableError(f"printing 42 ended with {result.status}: {said}")
