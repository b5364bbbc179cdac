"""What limits hold in a sandbox, and what comes out of it.

    with BubblewrapSandbox() as sandbox:           # start … close
        result = sandbox.run({"main.py": b"print(6 * 7)"}, ["python", "main.py"])
        assert result.ok and result.stdout == b"42\\n"

A sandbox runs one program at a time; a `SandboxPool` runs several. Every program starts in an empty
folder, and nothing that it does is seen by the next. Whatever a program does is a `RunResult`; a
`SandboxError` means that the sandbox itself failed, which says nothing about the program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from ludic.errors import ConfigError, EnvError

MAX_INPUT_BYTES = 256 << 20
MAX_LINE = 1 << 20


class SandboxError(EnvError):
    """The sandbox failed; what the program would have done is not known."""


class SandboxUnavailableError(ConfigError):
    """This machine cannot run the sandbox that was asked for."""


class RunStatus(StrEnum):
    """How a program ended."""

    OK = "ok"
    """By itself, with exit status 0."""
    ERROR = "error"
    """By itself, with another exit status."""
    SIGNAL = "signal"
    """By a signal that no limit sent."""
    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    """It wrote more than it may."""
    KILLED = "killed"
    """Its session was closed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use, all its processes together unless said otherwise."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: float = 512
    processes: int = 32
    """Processes and threads at the same time."""
    file_mb: float = 16
    """The largest file."""
    disk_mb: float = 64
    """All files together; they live in memory."""
    files: int = 4096
    open_files: int = 128
    """Per process."""
    output_kb: float = 1024
    """Standard output and standard error, each."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"Limits({field.name}={value!r}): must be a number above 0")

    @classmethod
    def of(cls, given: Limits | Mapping[str, Any] | None, **defaults: Any) -> Limits:
        """Limits as they are, or from a mapping of those that differ from the defaults."""
        if isinstance(given, Limits):
            return given
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(given or {}) - names):
            raise ConfigError(f"unknown limits {unknown}; there are: {sorted(names)}")
        return cls(**{**defaults, **(given or {})})

    def as_json(self) -> dict[str, float]:
        """In seconds, bytes and counts, as the worker takes them."""
        return {
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "memory_bytes": int(self.memory_mb * 2**20),
            "processes": self.processes,
            "file_bytes": int(self.file_mb * 2**20),
            "disk_bytes": int(self.disk_mb * 2**20),
            "files": self.files,
            "open_files": self.open_files,
            "output_bytes": int(self.output_kb * 1024),
        }


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a program did. `exit_code` is negative for a signal, and None where a limit ended it."""

    status: RunStatus
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status is RunStatus.OK

    @property
    def late(self) -> bool:
        """Whether a busy machine may be to blame: it ran out of time, but did not compute for
        all of it."""
        return self.status is RunStatus.WALL_TIME and self.cpu_s <= 0.9 * self.wall_s


def text_of(data: bytes, last: int | None = None) -> str:
    """Output as text, or its `last` characters; what is not UTF-8 is replaced."""
    text = data.decode("utf-8", "replace").strip()
    return text if last is None else text[-last:]


def text_of_line(line: bytes) -> str | None:
    """The text of a line that is one JSON string; None for anything else. A string has no depth,
    and a character that cannot be encoded (half of a pair) becomes a question mark."""
    if not (line.startswith(b'"') and line.endswith(b"\n")):
        return None
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None
