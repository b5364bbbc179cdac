"""The template, and the supervisors that are forks of it: one process per program.

The template has never seen a request. Over its control socket come its settings, once, and then one
byte per program with a descriptor: the socket over which the host sends that program to a fork. So
no content of anybody's is ever in its memory, its frames or its descriptors.

A supervisor reads one request from its own socket, starts the program, watches its limits, says how
it ended, and ends with it; so whatever it holds belongs to that program alone. Frames on the socket
are four bytes for the length of the rest, one for the kind, and the content. From the host come `R`
(the request: a JSON header with its length, then the contents of the files and of standard input),
`I` (more input), `E` (no more input) and `K` (end the program). Back go `O` with output of an
interactive program, and at the end one `D` (a header, standard output and standard error) or `X`
(the sandbox failed).

Nothing here waits for the host while a program runs: what cannot be sent is kept, a bounded
amount of it, and the program is not read from until there is room.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from ludic.envs.code_exec.sandbox.inside import confine, program, tree

CHUNK = 65536
MAX_UNSENT = 4 * CHUNK
"""How much output of an interactive program waits for the host."""
MAX_ERRORS = CHUNK
"""How much of an interactive program's standard error is kept."""
FIRST_LOOK_S, LOOK_S, IDLE_LOOK_S = 0.01, 0.02, 0.2
DRAIN_S = 2.0
HOST_S = 60.0
"""How long the host may take to send the request, and to take the result."""


class HostGone(Exception):
    """Nobody listens any more."""


class Channel:
    """The frames to and from the host. Only `request` and `flush` wait, and not for ever."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.unsent = bytearray()
        self._buffer = bytearray()

    def put(self, kind: bytes, *parts: bytes) -> None:
        size = 1 + sum(map(len, parts))
        self.unsent += b"".join((size.to_bytes(4, "big"), kind, *parts))

    def write(self) -> None:
        """Sends what fits."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.fd, self.unsent[: 1 << 20])]
        except BlockingIOError:
            return
        except OSError:
            raise HostGone from None

    def read(self) -> None:
        """Takes in what has come."""
        try:
            data = os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return
        except OSError:
            raise HostGone from None
        if not data:
            raise HostGone
        self._buffer += data

    def frame(self) -> tuple[bytes, bytes] | None:
        """The next whole frame, if it is there."""
        if len(self._buffer) < 4:
            return None
        end = 4 + int.from_bytes(self._buffer[:4], "big")
        if len(self._buffer) < end:
            return None
        kind, content = bytes(self._buffer[4:5]), bytes(self._buffer[5:end])
        del self._buffer[:end]
        return kind, content

    def request(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The first frame: the request, and its files by name; standard input has none."""
        deadline = time.monotonic() + HOST_S
        while (frame := self.frame()) is None:
            self._wait(select.POLLIN, deadline)
            self.read()
        _, content = frame
        end = 4 + int.from_bytes(content[:4], "big")
        request = json.loads(content[4:end])
        blobs: dict[str, bytes] = {}
        for name, size in request["blobs"]:
            blobs[name] = content[end : end + size]
            end += size
        return request, blobs

    def flush(self) -> None:
        """Sends everything. No program runs any more."""
        deadline = time.monotonic() + HOST_S
        while self.unsent:
            self._wait(select.POLLOUT, deadline)
            self.write()

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.fd, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise HostGone


class Running:
    """One program under way, from the fork to its last byte of output."""

    def __init__(self, channel: Channel, request: dict[str, Any], blobs: dict[str, bytes]) -> None:
        self.channel, self.request, self.limits = channel, request, request["limits"]
        self.interactive: bool = request["interactive"]
        self.input = bytearray(blobs.pop("", b""))
        self.input_over = not self.interactive
        self.outputs = {1: bytearray(), 2: bytearray()}
        self.written = {1: 0, 2: 0}
        self.stopped: str | None = None
        self.status: bytes | None = None
        self.begun = False
        self.cpu_s = 0.0
        self.look_s = LOOK_S
        self.own_bytes = tree.own_bytes()
        self.started = time.monotonic()
        stdin_r, self.stdin = os.pipe()
        self.stdout, stdout_w = os.pipe()
        self.stderr, stderr_w = os.pipe()
        self.status_fd, status_w = os.pipe()
        if request["mode"] == "bubblewrap":
            confine.own_namespaces()
        self.init = os.fork()
        if self.init == 0:
            program.become_init(request, blobs, (stdin_r, stdout_w, stderr_w), status_w)
        if request["mode"] == "bubblewrap":
            confine.drop_capabilities()
        for fd in (stdin_r, stdout_w, stderr_w, status_w):
            os.close(fd)
        for fd in (self.stdin, self.stdout, self.stderr, self.status_fd):
            os.set_blocking(fd, False)

    def watch(self) -> None:
        """Moves input and output, and looks after the limits, until the program is over."""
        deadline = self.started + self.limits["wall_s"]
        look = self.started + FIRST_LOOK_S
        self._take_frames()  # some may have come with the request
        while self.status is None and self.stopped is None:
            now = time.monotonic()
            if now >= deadline:
                self.stopped = "wall_time"
            elif now >= look:
                look = now + self._look()
            self._poll(max(0.0, min(deadline, look) - now))
        self._end()

    def _poll(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(
            self.channel.fd, select.POLLIN | (select.POLLOUT if self.channel.unsent else 0)
        )
        if self.stdout >= 0 and len(self.channel.unsent) < MAX_UNSENT:
            poll.register(self.stdout, select.POLLIN)
        if self.stderr >= 0:
            poll.register(self.stderr, select.POLLIN)
        if self.status is None:
            poll.register(self.status_fd, select.POLLIN)
        if self.stdin >= 0 and self.input:
            poll.register(self.stdin, select.POLLOUT)
        elif self.stdin >= 0 and self.input_over:
            self.stdin = _closed(self.stdin)
        for fd, events in poll.poll(timeout_s * 1000 + 0.5):
            if fd == self.stdin:
                self._feed()
            elif fd == self.channel.fd:
                if events & select.POLLOUT:
                    self.channel.write()
                if events & ~select.POLLOUT:
                    self.channel.read()
                    self._take_frames()
            elif fd == self.status_fd:
                self._take_status()
            elif fd == self.stdout:
                self.stdout = self._collect(fd, 1)
            elif fd == self.stderr:
                self.stderr = self._collect(fd, 2)

    def _feed(self) -> None:
        try:
            del self.input[: os.write(self.stdin, self.input[:CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program has closed its input: it needs no more
            self.input.clear()
            self.stdin = _closed(self.stdin)

    def _take_frames(self) -> None:
        while (frame := self.channel.frame()) is not None:
            kind, content = frame
            if kind == b"I":
                self.input += content
            elif kind == b"E":
                self.input_over = True
            elif kind == b"K":
                self.stopped = self.stopped or "killed"

    def _take_status(self) -> None:
        """What its init says. If it ends without a word after the program began, that is the
        program's doing."""
        try:
            data = os.read(self.status_fd, 4096)
        except BlockingIOError:
            return
        self.begun = self.begun or data.startswith(b"B")
        if status := data.removeprefix(b"B"):
            self.status = status
        elif not data and self.status is None:
            vanished = b"S" + int(signal.SIGKILL).to_bytes(4, "big") if self.begun else b"E"
            self.status = vanished if self.stopped is None else b""

    def _collect(self, fd: int, number: int) -> int:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return fd
        if not data:
            return _closed(fd)
        limit = int(self.limits["output_bytes"])
        room = max(0, limit - self.written[number])
        self.written[number] += len(data)
        if len(data) > room:
            self.stopped = self.stopped or "output"
        if self.interactive and number == 1:
            self.channel.put(b"O", data[:room])
        else:
            most = min(limit, MAX_ERRORS) if self.interactive else limit
            self.outputs[number] += data[: max(0, most - len(self.outputs[number]))]
        return fd

    def _look(self) -> float:
        """The memory, processes and CPU time of the whole tree; when to look again. A session
        that waits for input is looked at less often."""
        used = tree.usage(self.own_bytes)
        idle = self.interactive and used["cpu"] == self.cpu_s and not self.input
        self.look_s = min(self.look_s * 1.5, IDLE_LOOK_S) if idle else LOOK_S
        self.cpu_s = max(self.cpu_s, used["cpu"])
        if used["memory"] > self.limits["memory_bytes"]:
            self.stopped = "memory"
        elif used["tasks"] - 1 > self.limits["processes"]:  # its init is not its own
            self.stopped = "processes"
        elif used["cpu"] > self.limits["cpu_s"]:
            self.stopped = "cpu_time"
        return self.look_s

    def _end(self) -> None:
        """Ends every process of the program, and takes what it still wrote."""
        self._take_status()
        tree.kill(self.init)
        drained = time.monotonic() + DRAIN_S
        while (self.stdout >= 0 or self.stderr >= 0) and time.monotonic() < drained:
            if self.stopped is not None and self.stopped != "killed":
                break
            self.input.clear()
            self._poll(0.05)

    def report(self) -> None:
        """Says how it ended."""
        status = self.status or b""
        if status[:1] == b"E" or (not status and self.stopped is None):
            why = status[1:].decode("utf-8", "replace") or "the program's init process vanished"
            raise RuntimeError(why)
        code = os.waitstatus_to_exitcode(int.from_bytes(status[1:5], "big")) if status else None
        head = {
            "stopped": self.stopped,
            "exit_code": code,
            "wall_s": time.monotonic() - self.started,
            "cpu_s": self.cpu_s,
            "stdout": len(self.outputs[1]),
        }
        text = json.dumps(head).encode()
        size = len(text).to_bytes(4, "big")
        self.channel.put(b"D", size, text, bytes(self.outputs[1]), bytes(self.outputs[2]))


def _closed(fd: int) -> int:
    os.close(fd)
    return -1


def empty(folder: str) -> None:
    """Removes everything in a folder, whatever its permissions."""
    for root, dirs, _ in os.walk(folder):
        for path in [os.path.join(root, name) for name in dirs]:
            if not os.path.islink(path):  # which may point anywhere
                with suppress(OSError):
                    os.chmod(path, 0o700)
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(entry.path)


def supervise(settings: Mapping[str, Any], fd: int) -> NoReturn:
    """Runs the one program that comes over `fd`, and leaves nothing of it."""
    channel = Channel(fd)
    plain = settings["mode"] == "plain"
    try:
        confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
        request, blobs = channel.request()
        request.update(settings)
        request["others"] = tree.tasks_of_user() if plain else 0
        running = Running(channel, request, blobs)
        running.watch()
        running.report()
    except HostGone:
        channel.unsent.clear()
    except BaseException as error:  # it says nothing about the program: the sandbox failed
        channel.put(b"X", f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
    with suppress(Exception):
        tree.kill()
        if plain:  # before anything is said, since the next program may begin then
            empty(settings["folder"])
        channel.flush()
    os._exit(0)


def main(settings: Mapping[str, Any]) -> NoReturn:
    """The template: forks until nobody asks any more. It ends when its host does."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # else the collector of every fork copies all of its pages
    control.sendall(b"H")
    try:
        while True:
            asked, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not asked:
                break
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                control.close()
                supervise(settings, descriptors[0])
            os.close(descriptors[0])
    except BaseException as error:  # the host reads it, and counts the worker as broken
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        if settings["mode"] == "plain":
            with suppress(Exception):
                tree.kill()
                empty(settings["folder"])
                os.rmdir(settings["folder"])
        os._exit(0)
