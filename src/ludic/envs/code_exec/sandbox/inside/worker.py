"""The worker: a process that runs nothing itself and forks one process for each program.

It speaks over its standard input and output, in frames: one byte for the kind, four for the
length, and the content. From outside come `R` (a request: a JSON header with its length, then the
contents of the files and of standard input), `I` (more input), `E` (no more input) and `K` (end
the program). It answers `H` once it is ready, `O` with output of an interactive program, and for
each request one `D` (a header, standard output and standard error) or `X` (the sandbox failed).

A program shares with it neither a descriptor nor, in a namespace, a process number, so it can
write no frame and end no worker. The worker ends when its input does: with whoever started it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from ludic.envs.code_exec.sandbox.inside import confine, program, tree

CHUNK = 65536
FIRST_LOOK_S, LOOK_S, IDLE_LOOK_S = 0.01, 0.02, 0.2
DRAIN_S = 2.0


class HostGone(Exception):
    """Nobody listens any more."""


class Channel:
    """The frames to and from whoever started the worker."""

    def __init__(self, fd_in: int, fd_out: int) -> None:
        self.fd_in, self.fd_out = fd_in, fd_out
        self._buffer = bytearray()

    def send(self, kind: bytes, *parts: bytes) -> None:
        rest = memoryview(kind + sum(map(len, parts)).to_bytes(4, "big") + b"".join(parts))
        while rest:
            try:
                rest = rest[os.write(self.fd_out, rest) :]
            except BrokenPipeError:
                raise HostGone from None

    def read(self) -> None:
        """Takes in what has come; call it when there is something."""
        data = os.read(self.fd_in, 1 << 20)
        if not data:
            raise HostGone
        self._buffer += data

    def frame(self) -> tuple[bytes, bytes] | None:
        """The next whole frame, if it is there."""
        if len(self._buffer) < 5:
            return None
        end = 5 + int.from_bytes(self._buffer[1:5], "big")
        if len(self._buffer) < end:
            return None
        kind, content = bytes(self._buffer[:1]), bytes(self._buffer[5:end])
        del self._buffer[:end]
        return kind, content

    def wait(self) -> tuple[bytes, bytes]:
        while (frame := self.frame()) is None:
            self.read()
        return frame


class Running:
    """One program under way, from the fork to its last byte of output."""

    def __init__(self, channel: Channel, request: dict[str, Any], blobs: dict[str, bytes]) -> None:
        self.channel, self.request, self.limits = channel, request, request["limits"]
        self.interactive: bool = request["interactive"]
        self.input = bytearray(blobs.pop("", b""))
        self.input_over = not self.interactive
        self.outputs = {1: bytearray(), 2: bytearray()}
        self.streamed = 0
        self.stopped: str | None = None
        self.status: bytes | None = None
        self.peak_bytes = 0
        self.cpu_s = 0.0
        self.look_s = LOOK_S
        self.started = time.monotonic()
        stdin_r, self.stdin = os.pipe()
        self.stdout, stdout_w = os.pipe()
        self.stderr, stderr_w = os.pipe()
        self.status_fd, status_w = os.pipe()
        self.init = self._fork((stdin_r, stdout_w, stderr_w), status_w, blobs)
        for fd in (stdin_r, stdout_w, stderr_w, status_w):
            os.close(fd)
        for fd in (self.stdin, self.stdout, self.stderr, self.status_fd):
            os.set_blocking(fd, False)

    def _fork(self, fds: tuple[int, ...], status_w: int, files: Mapping[str, bytes]) -> int:
        """The number of the program's init; 0 if it never came to be."""
        if self.request["mode"] != "nested":
            pid = os.fork()
            if pid == 0:
                program.become_init(self.request, files, fds, status_w)
            return pid
        uid, gid = os.getuid(), os.getgid()
        pid_r, pid_w = os.pipe()
        between = os.fork()
        if between == 0:
            try:
                confine.prctl(confine.PR_SET_DUMPABLE, 1)  # else its uid_map belongs to root
                confine.unshare(
                    confine.CLONE_NEWUSER
                    | confine.CLONE_NEWPID
                    | confine.CLONE_NEWNS
                    | confine.CLONE_NEWIPC
                )
                confine.map_own_ids(uid, gid)
                init = os.fork()
                if init == 0:
                    program.become_init(self.request, files, fds, status_w)
                os.write(pid_w, init.to_bytes(4, "big"))
            except BaseException as error:
                os.write(status_w, b"E" + f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(pid_w)
        os.waitpid(between, 0)
        number = os.read(pid_r, 4)
        os.close(pid_r)
        return int.from_bytes(number, "big")

    def watch(self) -> None:
        """Moves input and output, and looks after the limits, until the program is over."""
        deadline = self.started + self.limits["wall_s"]
        look = self.started + FIRST_LOOK_S
        self._take_frames()  # some may have come with the request
        while self.status is None and self.stopped is None:
            now = time.monotonic()
            if now >= deadline:
                self.stopped = "wall"
            elif now >= look:
                look = now + self._look()
            self._poll(max(0.0, min(deadline, look) - now))
        self._end()

    def _poll(self, timeout_s: float) -> None:
        poll = select.poll()
        for fd in (self.stdout, self.stderr, self.channel.fd_in):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        if self.status is None:
            poll.register(self.status_fd, select.POLLIN)
        if self.stdin >= 0 and self.input:
            poll.register(self.stdin, select.POLLOUT)
        elif self.stdin >= 0 and self.input_over:
            self.stdin = _closed(self.stdin)
        for fd, _ in poll.poll(timeout_s * 1000 + 0.5):
            if fd == self.stdin:
                self._feed()
            elif fd == self.channel.fd_in:
                self.channel.read()
                self._take_frames()
            elif fd == self.status_fd:
                self.status = os.read(fd, 4096)
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
                self.stopped = "killed"

    def _collect(self, fd: int, number: int) -> int:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return fd
        if not data:
            return _closed(fd)
        kept, limit = self.outputs[number], int(self.limits["output_bytes"])
        if number == 1 and self.interactive:
            self.streamed += len(data)
            if self.streamed <= limit:
                self.channel.send(b"O", data)
            else:
                self.stopped = self.stopped or "output"
            return fd
        kept += data
        if len(kept) > limit:
            del kept[limit:]
            self.stopped = self.stopped or "output"
        return fd

    def _look(self) -> float:
        """The memory, processes and CPU time of the whole tree; when to look again. A session
        that waits for input is looked at less often."""
        found = tree.usage(self.request["mode"])
        idle = self.interactive and found["cpu"] == self.cpu_s and not self.input
        self.look_s = min(self.look_s * 1.5, IDLE_LOOK_S) if idle else LOOK_S
        self.peak_bytes = max(self.peak_bytes, found["memory"])
        self.cpu_s = max(self.cpu_s, found["cpu"])
        if found["memory"] > self.limits["memory_bytes"]:
            self.stopped = "memory"
        elif found["tasks"] - 1 > self.limits["processes"]:  # its init is not its own
            self.stopped = "processes"
        elif found["cpu"] > self.limits["cpu_s"]:
            self.stopped = "cpu"
        return self.look_s

    def _end(self) -> None:
        """Ends every process of the program, and takes what it still wrote."""
        if self.status is None:
            with suppress(BlockingIOError):
                self.status = os.read(self.status_fd, 4096)
        tree.kill(self.request["mode"], self.init)
        drained = time.monotonic() + DRAIN_S
        while (self.stdout >= 0 or self.stderr >= 0) and time.monotonic() < drained:
            if self.stopped is not None and self.stopped != "killed":
                break
            self.input.clear()
            self._poll(0.05)
        for fd in (self.stdin, self.stdout, self.stderr, self.status_fd):
            if fd >= 0:
                os.close(fd)

    def report(self) -> None:
        """Says how it ended."""
        status = self.status or b""
        if status[:1] == b"E" or (not status and self.stopped is None):
            why = status[1:].decode("utf-8", "replace") or "the program's init process vanished"
            self.channel.send(b"X", why.encode())
            return
        code = os.waitstatus_to_exitcode(int.from_bytes(status[1:5], "big")) if status else None
        head = {
            "stopped": self.stopped,
            "exit_code": code,
            "wall_s": time.monotonic() - self.started,
            "cpu_s": self.cpu_s,
            "peak_bytes": self.peak_bytes,
            "stdout": len(self.outputs[1]),
        }
        text = json.dumps(head).encode()
        size = len(text).to_bytes(4, "big")
        self.channel.send(b"D", size, text, bytes(self.outputs[1]), bytes(self.outputs[2]))


def _closed(fd: int) -> int:
    os.close(fd)
    return -1


def empty(folder: str) -> None:
    """Removes everything in a folder, whatever rights it was given."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        for root, dirs, _ in os.walk(path):
            for entry in dirs:
                with suppress(OSError):
                    os.chmod(os.path.join(root, entry), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            with suppress(OSError):
                os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(path)


def main(settings: Mapping[str, Any]) -> NoReturn:
    """Serves until nobody listens."""
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    mode, folder = settings["mode"], settings["folder"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    channel.send(b"H", json.dumps({"python": sys.version.split()[0]}).encode())
    try:
        while True:
            kind, content = channel.wait()
            if kind != b"R":
                continue  # meant for a program that has ended meanwhile
            end = 4 + int.from_bytes(content[:4], "big")
            request = json.loads(content[4:end])
            request.update(settings)
            request["others"] = tree.tasks_of_user() if mode == "plain" else 0
            blobs: dict[str, bytes] = {}
            for name, size in request["blobs"]:
                blobs[name] = content[end : end + size]
                end += size
            running = Running(channel, request, blobs)
            del content, blobs
            running.watch()
            running.report()
            if mode == "plain":
                empty(folder)
    except HostGone:
        pass
    except BaseException as error:  # the host reads it, and counts the worker as broken
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        if mode == "plain":
            with suppress(Exception):
                tree.kill(mode, 0)
                empty(folder)
                os.rmdir(folder)
        os._exit(0)
