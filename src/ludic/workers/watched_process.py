"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_STOP_S = 30.0
ENDS_WITHIN_S = 10
"""A process that a run started ends this long after it, in seconds, or sooner."""

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
        # A child has the signals blocked that this thread has: in Ray's threads that is a Ctrl-C.
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            super().__init__(command, start_new_session=True, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._watcher = end_with_us(self.pid)

    def end(self, sign: signal.Signals = signal.SIGTERM, grace_s: float = _STOP_S) -> None:
        """Ends it, unless it has ended by itself: by force where the signal was not enough."""
        self.send_signal(sign)
        try:
            self.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait(_STOP_S)
        self._watcher.communicate(b"\n", _STOP_S)


def signal_group(group: int, sign: signal.Signals) -> None:
    """Sends a signal to all processes of a group, as far as there are any and they are ours."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, sign)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this host that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def last_words(log: Path, lines: int) -> str:
    """The last lines of a log, as one."""
    with suppress(OSError), open(log, encoding="utf-8", errors="replace") as file:
        return " | ".join(map(str.strip, deque(file, maxlen=lines))) or "it said nothing"
    return "it said nothing"
