"""A Python function in a separate process, which can be killed.

The child runs `python -m ludic.workers.child_process module:factory FD`. The factory is called once
with the first message and returns a function, which answers every message after that. Messages are
frames of plain values: nothing is pickled, and what the child prints goes to the standard error.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

import msgspec

from ludic.errors import DeadlineError, LudicError, SerializationError
from ludic.plumbing.lazy import resolve
from ludic.plumbing.records import ready
from ludic.plumbing.text import described
from ludic.workers.frames import Frames, encode
from ludic.workers.watched_process import signal_group

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_REAP_S = 5.0

Answerer: TypeAlias = Callable[[Any], Any]


class ChildError(LudicError):
    """The function in the child raised, or the child is gone."""


class _Answer(msgspec.Struct, frozen=True):
    value: Any = None
    error: str | None = None


def start_child(
    module: str, *arguments: str, **environment: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts `python -m module … FD`, and returns the process and our end of its socket. It leads a
    process group, so that killing that takes its own children along."""
    ours, theirs = socket.socketpair()
    python_path = os.pathsep.join(filter(None, sys.path))
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path, **environment},
        )
    return child, ours


class ChildProcess:
    """The parent's end. `ask` blocks: call it from a worker thread.

    Every `ask` has a deadline, after which the child is killed with all that it started; `kill`
    may be called from any thread, and makes a waiting `ask` raise at once. The child ends by
    itself when the parent is gone.

    Threads: the socket belongs to whoever holds `_asking`, so messages never mix, and it is closed
    only under it. `kill` does not take it: it has to work while an `ask` hangs, and it sends only a
    signal. The process id stays valid until `close` waits for the child, after the kill, so the
    signal cannot reach a stranger.
    """

    def __init__(self, factory: str, setup: Any, *, name: str) -> None:
        self.name = name
        self._setup: bytes | None = _message(setup)
        self._asking = threading.Lock()
        self._killing = threading.Lock()
        self._killed = False
        self._child, end = start_child(__name__, factory)
        self._frames = Frames(end, MAX_MESSAGE_BYTES)

    def ask(self, message: Any, *, timeout_s: float, what: str = "an answer") -> Any:
        """The child's answer. Raises `ChildError`, or `DeadlineError`, which kills the child.
        Asks from several threads take turns."""
        data = _message(message)
        deadline = time.monotonic() + timeout_s
        try:
            if not self._asking.acquire(timeout=timeout_s):
                raise TimeoutError
            try:
                if self._setup is not None:
                    self._exchange(self._setup, deadline)
                    self._setup = None
                return self._exchange(data, deadline)
            finally:
                self._asking.release()
        except TimeoutError:
            self.kill()
            raise DeadlineError(what, self.name, timeout_s) from None
        except (OSError, EOFError, ValueError, SerializationError) as error:
            how = "was killed" if self._killed else "ended"
            self.kill()
            raise ChildError(f"the process of {self.name} {how} while {what} was due") from error

    @property
    def is_alive(self) -> bool:
        """Whether it was neither killed nor ended by itself."""
        return not self._killed and self._child.poll() is None

    def kill(self) -> None:
        """Ends the child and everything that it started. Safe to call again."""
        with self._killing:  # once, and before it is reaped: its number may be reused after that
            if not self._killed:
                self._killed = True
                signal_group(self._child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the child and frees the socket."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=_REAP_S)
        with self._asking:  # whoever was asking has seen the other end close
            self._frames.close()

    def _exchange(self, data: bytes, deadline: float) -> Any:
        self._frames.send(data, deadline=deadline)
        answer = msgspec.msgpack.decode(self._frames.receive(deadline), type=ready(_Answer))
        if answer.error is not None:
            raise ChildError(answer.error)
        return answer.value


def _message(value: Any) -> bytes:
    data = encode(value)
    if len(data) > MAX_MESSAGE_BYTES:
        raise SerializationError(
            f"a message of {len(data):,} bytes; the limit is {MAX_MESSAGE_BYTES:,}"
        )
    return data


def _serve(factory: str, end: socket.socket) -> None:
    """The child: answers messages until the parent closes the socket."""
    end.set_inheritable(False)
    os.dup2(2, 1)  # what the function prints is not for whoever reads our parent's output
    frames = Frames(end, MAX_MESSAGE_BYTES)
    inbox: SimpleQueue[Any] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                inbox.put(msgspec.msgpack.decode(frames.receive()))
        finally:  # the parent is gone: end, whatever the main thread is doing
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    answer: Answerer | None = None
    while True:
        message = inbox.get()
        try:
            if answer is None:
                answer = resolve(factory)(message)
                frames.send(_message({}))
            else:
                frames.send(_message({"value": answer(message)}))
        except BaseException as error:
            frames.send(_message({"error": described(error)[:10_000]}))


if __name__ == "__main__":
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
