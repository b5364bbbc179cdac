"""The tool `python`: a session that keeps its state, in a sandbox."""

from __future__ import annotations

import inspect
import json
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from ludic.envs.code_exec.program_text import text_of_line
from ludic.envs.code_exec.sandbox import (
    DEFAULT_SANDBOX,
    Limits,
    Program,
    SandboxError,
    SandboxPool,
    check_sandbox,
)

_MAX_LINE, _MAX_TEXT = 128 << 10, 9000
"""What a session says is shortened there, below these."""
_SESSIONS = 64
_PROGRAM = Path(__file__).with_name("session_program.py")

_pools: dict[tuple[int, str], SandboxPool] = {}
_making = threading.Lock()


def session_pool(sandbox: str) -> SandboxPool:
    """The sandboxes of all sessions of this process: at most 64 at the same time. A process that
    was forked has its own, since sandboxes are the processes of whoever started them."""
    key = (os.getpid(), sandbox)
    with _making:
        if key not in _pools:
            _pools[key] = SandboxPool(sandbox, workers=_SESSIONS, queue_s=30.0)
        return _pools[key]


class PythonTool:
    """A Python session, for one agent at a time. It begins with the first call, in a sandbox; a
    call that takes longer than `call_s`, or goes beyond the `limits` of the session, ends it, and
    the next one begins anew. What a model is told of it is the docstring of `__call__`.
    """

    __name__ = "python"

    def __init__(
        self,
        *,
        sandbox: str = DEFAULT_SANDBOX,
        call_s: float = 10.0,
        limits: Limits | None = None,
    ) -> None:
        self.__doc__ = inspect.getdoc(type(self).__call__)
        self.call_s = call_s
        self._sandbox = sandbox
        self._limits = limits or Limits(wall_s=3600, cpu_s=600, output_kb=64 * 1024)
        self._lock = threading.Lock()
        self._lease = ExitStack()
        self._program: Program | None = None

    def __call__(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last expression.
        Variables, imports and files are kept until the end of the episode.

        Args:
            code: The code to run.
        """
        with self._lock:
            try:
                return self._run(code)
            except SandboxError:
                self._end()
                raise

    def check_machine(self) -> None:
        """Raises if this machine cannot run the sandbox; asked before a run begins."""
        check_sandbox(self._sandbox)

    def close(self) -> None:
        """Ends the session. A later call begins a new one."""
        with self._lock:
            self._end()

    def _run(self, code: str) -> str:
        if "\0" in code:
            return "ValueError: the code contains null bytes"
        program = self._program or self._start()
        program.send(json.dumps(code).encode() + b"\n")
        try:
            line = program.receive_line(self.call_s, _MAX_LINE)
        except TimeoutError:
            self._end()
            return (
                f"TimeoutError: the code did not end within {self.call_s:g} s. The session was "
                "ended; the next call starts an empty one."
            )
        if line is None:
            status = program.finish().status
            self._end()
            return f"The session ended ({status}); the next call starts an empty one."
        said = text_of_line(line)
        if said is None or len(said) > _MAX_TEXT:
            self._end()
            return "The session ended: it wrote to the pipe that it is asked through."
        return said

    def _start(self) -> Program:
        (sandbox,) = self._lease.enter_context(session_pool(self._sandbox).lease())
        self._program = sandbox.open(
            {"session_program.py": _PROGRAM.read_bytes()},
            ["python", "session_program.py"],
            self._limits,
        )
        return self._program

    def _end(self) -> None:
        program, self._program = self._program, None
        lease, self._lease = self._lease, ExitStack()
        with lease:
            if program is not None:
                with suppress(SandboxError):
                    program.kill()

    def __del__(self) -> None:
        with suppress(Exception):
            self._end()
