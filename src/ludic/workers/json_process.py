"""A Python function in a separate process, spoken to in JSON, and killable.

The child runs `python -m ludic.workers.json_process module:factory`. The factory is called once
with the first message and returns a function, which answers every message after that. A message is
a length and that many bytes of JSON: nothing is pickled, and what the child prints goes to the
standard error.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from ludic.errors import DeadlineError, LudicError
from ludic.plumbing.lazy import resolve
from ludic.plumbing.raised import described

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")
_CHUNK = 65536
_REAP_S = 5.0

Answerer: TypeAlias = Callable[[Any], Any]


class ChildError(LudicError):
    """The function in the child raised, or the child is gone."""


class JsonProcess:
    """The parent's end. `ask` blocks: call it from a worker thread.

    Every `ask` has a deadline, after which the child is killed with all that it started; `kill`
    may be called from any thread, and makes a waiting `ask` raise at once. The child ends by
    itself when the parent is gone.

    Threads: the pipes belong to whoever holds `_asking`, so messages never mix, and they are
    closed only under it. `kill` does not take it: it has to work while an `ask` hangs, and it
    sends only a signal. The process id stays valid until `close` waits for the child, after the
    kill, so the signal cannot reach a stranger.
    """

    def __init__(self, factory: str, setup: Any, *, name: str) -> None:
        self.name = name
        self._setup: bytes | None = _encode(setup)
        self._asking = threading.Lock()
        self._killing = threading.Lock()
        self._killed = False
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, factory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # so that killing it takes its own children along
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._to_child = self._child.stdin.fileno()
        self._from_child = self._child.stdout.fileno()
        os.set_blocking(self._to_child, False)
        os.set_blocking(self._from_child, False)

    def ask(self, message: Any, *, timeout_s: float, what: str = "an answer") -> Any:
        """The child's answer. Raises `ChildError`, or `DeadlineError`, which kills the child.
        Asks from several threads take turns."""
        data = _encode(message)
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
        except (OSError, EOFError, ValueError) as error:
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
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the child and frees the pipes."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=_REAP_S)
        with self._asking:  # whoever was asking has seen the pipe close
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def _exchange(self, data: bytes, deadline: float) -> Any:
        if self._child.stdin is None or self._child.stdin.closed:
            raise EOFError("the pipe was closed")
        rest = memoryview(_LENGTH.pack(len(data)) + data)
        while rest:
            _wait(self._to_child, select.POLLOUT, deadline)
            rest = rest[os.write(self._to_child, rest[:_CHUNK]) :]
        size = _checked_size(self._receive(_LENGTH.size, deadline))
        answer = json.loads(self._receive(size, deadline))
        if "error" in answer:
            raise ChildError(str(answer["error"]))
        return answer["value"]

    def _receive(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            _wait(self._from_child, select.POLLIN, deadline)
            part = os.read(self._from_child, min(size, _CHUNK))
            if not part:
                raise EOFError("the pipe was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _encode(message: Any) -> bytes:
    data = json.dumps(message, default=_plain).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return data


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's; they are common in environments."""
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}, which is not JSON")


def _checked_size(header: bytes) -> int:
    size: int = _LENGTH.unpack(header)[0]
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return size


def _serve(factory: str) -> None:
    """The child: answers messages until the parent closes the pipe."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # What the function prints or reads must not get into the conversation.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    inbox: SimpleQueue[Any] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                size = _checked_size(requests.read(_LENGTH.size))
                inbox.put(json.loads(requests.read(size)))
        finally:  # the parent is gone: end, whatever the main thread is doing
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    answer: Answerer | None = None
    while True:
        message = inbox.get()
        try:
            if answer is None:
                answer = resolve(factory)(message)
                data = _encode({"value": None})
            else:
                data = _encode({"value": answer(message)})
        except BaseException as error:
            data = _encode({"error": described(error)[:10_000]})
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
