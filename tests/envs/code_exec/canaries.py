"""A program that looks everywhere for canaries, and episodes that plant them everywhere else.

A canary is `canary-KIND-` and sixteen hexadecimal digits. The scan reads all readable memory of its
own process and of every other that it may, every frame, every object, every descriptor, the file
system outside of the system's own folders, and the environment; it says where it found which.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from ludic.envs.code_exec import FunctionTask, IOCase, Judge, Limits, PythonTool, StdioTask, tools
from ludic.envs.code_exec.sandbox.base import RunResult
from ludic.envs.code_exec.sandbox.bubblewrap import BubblewrapSandbox
from ludic.envs.code_exec.sandbox.pool import Role, SandboxPool
from ludic.envs.code_exec.verifiers import make_verifier

SCAN = r"""
import gc, json, os, re, sys

WANTED = re.compile(b"cana" + b"ry-([a-z]+)-[0-9a-f]{16}")
hits, counted = set(), {}

def look(data, where):
    counted[where] = counted.get(where, 0) + len(data)
    for form in (data, data.replace(b"\0", b"")):  # text of wide characters has nulls in between
        for match in WANTED.finditer(form):
            hits.add((where, match[0].decode()))

def memory(pid, where):
    with open(f"/proc/{pid}/maps") as file:
        lines = file.read().splitlines()
    mem = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    for line in lines:
        span, rights = line.split()[:2]
        if rights[0] != "r" or "[v" in line:
            continue
        at, end = (int(number, 16) for number in span.split("-"))
        while at < end:
            try:
                data = os.pread(mem, min(end - at, 1 << 22), at)
            except OSError:
                data = b""
            look(data, where)
            if not data or at + len(data) >= end:
                break
            at += max(len(data) - 64, 1)  # one may lie across two pieces
    os.close(mem)

def every_frame():
    for frame in sys._current_frames().values():
        while frame is not None:
            look(repr((frame.f_locals, frame.f_code.co_consts)).encode("utf-8", "replace"), "frame")
            frame = frame.f_back

def every_object():
    gc.unfreeze()
    for one in gc.get_objects():
        for other in gc.get_referents(one):
            if isinstance(other, (bytes, bytearray)):
                look(bytes(other), "object")
            elif isinstance(other, str):
                look(other.encode("utf-8", "replace"), "object")

def descriptors(pid, where):
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        look(os.readlink(path).encode(), where)
        try:
            if pid == "self":
                fd = int(name)
                os.set_blocking(fd, False)
                look(os.read(fd, 1 << 20), where)
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            look(os.pread(fd, 1 << 20, 0), where)
            os.close(fd)
        except OSError:
            pass

def files(top):
    system = ("/proc", "/sys", "/usr", "/lib", "/bin", "/sbin", "/opt", sys.base_prefix)
    for root, folders, names in os.walk(top):
        if root.startswith(system):
            folders.clear()
            continue
        look(" ".join([root, *names]).encode("utf-8", "surrogateescape"), "file")
        for name in names:
            path = os.path.join(root, name)
            if os.path.isfile(path) and not os.path.realpath(path).startswith(system):
                with open(path, "rb") as file:
                    look(file.read(1 << 22), "file")

def tried(work, *args):
    try:
        work(*args)
    except (OSError, ValueError):
        pass

def scan(top="/", others=None):
    every_frame()
    every_object()
    tried(descriptors, "self", "descriptor")
    files(top)
    look(repr((dict(os.environ), sys.argv, sys.orig_argv, sys.path)).encode(), "environment")
    for pid in ("self", *filter(str.isdigit, others or os.listdir("/proc"))):
        own = pid in ("self", str(os.getpid()))
        for name in ("environ", "cmdline", "comm", "mountinfo", "auxv", "stack", "syscall"):
            def read():
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    look(file.read(), "environment" if own else "process")
            tried(read)
        if pid != str(os.getpid()):
            tried(memory, pid, "memory" if own else "process")
        if not own:
            tried(descriptors, pid, "process")
    return json.dumps({"hits": sorted(hits), "counted": counted})
"""


def canary(kind: str) -> str:
    return f"canary-{kind}-{secrets.token_hex(8)}"


@dataclass
class Report:
    """What the scans of all episodes found, and whether each found what it was itself given."""

    episodes: int = 0
    leaks: list[tuple[str, str, str]] = field(default_factory=list)
    """The mode, the place, the canary."""
    blind: list[str] = field(default_factory=list)
    """Modes whose scan did not find its own input in its own memory."""
    counted: dict[str, int] = field(default_factory=dict)
    workers: list[int] = field(default_factory=list)

    def take(self, mode: str, said: str, given: str) -> None:
        self.episodes += 1
        match = re.search(r'\{"hits".*\}\}', said)
        if match is None:
            raise AssertionError(f"the scan of {mode} said {said[-2000:]!r}")
        found: dict[str, Any] = json.loads(match[0])
        hits = [(where, what) for where, what in found["hits"]]
        self.leaks += [(mode, where, what) for where, what in hits if what != given]
        if ("memory", given) not in hits:
            self.blind.append(mode)
        for where, size in found["counted"].items():
            self.counted[where] = self.counted.get(where, 0) + size


class Recording(SandboxPool):
    """A pool that remembers what programs did, which a verdict does not say."""

    last: RunResult | None = None

    def run(
        self,
        files: Mapping[str, bytes],
        command: Sequence[str],
        stdin: bytes = b"",
        limits: Limits | None = None,
        *,
        role: Role = "program",
        alone: bool = False,
    ) -> RunResult:
        result = super().run(files, command, stdin, limits, role=role, alone=alone)
        if role == "program":
            self.last = result
        return result


LIMITS = Limits(wall_s=120, cpu_s=60)
CHECKER = "import sys\nsecret = {secret!r}\nsys.exit(open('output.txt').read() != {answer!r})"


def stdio(judge: Judge, pool: Recording, report: Report, checker: bool) -> None:
    """An honest episode, whose right answer is a canary, and one that scans."""
    mode, answer, given = "checker" if checker else "stdio", canary("answer"), canary("input")
    check = CHECKER.format(secret=canary("checker"), answer=answer) if checker else None
    task = StdioTask("", (IOCase(given, answer), IOCase("", canary("answer"))), check)
    honest = StdioTask("", (IOCase("", answer),), check)
    assert judge(honest, f"print({answer!r}, end='')").passed == 1
    kept = "given = input()\nprint(scan())"  # its own input is in its memory while it looks
    verdict = judge(task, f"{SCAN}\n{kept}")
    assert verdict.passed == 0
    assert pool.last is not None
    said = (pool.last.stdout + pool.last.stderr).decode()
    report.take(mode, said, given)


def functions(judge: Judge, report: Report) -> None:
    answer, given = canary("test"), canary("input")
    test = f"# {canary('test')}\nassert f({given!r}) == {answer!r}"
    task = FunctionTask("", "f", (test,))
    assert judge(task, f"def f(x):\n    return {answer!r}").passed == 1
    verdict = judge(task, f"{SCAN}\ndef f(given):\n    raise ValueError(scan())")
    assert verdict.passed == 0
    report.take("functions", verdict.message, given)


def python_tool(report: Report) -> None:
    given = canary("input")
    tool = PythonTool(limits=LIMITS, call_s=120)
    tool(f"secret = {canary('session')!r}\nprint({canary('output')!r})")
    tool.close()
    said = tool(f"{SCAN}\ngiven = {given!r}\nprint(scan())")
    tool.close()
    report.take("python", said, given)


def run_episodes(rounds: int) -> Report:
    """So many rounds of all four modes, on one worker for programs and one for judging."""
    os.environ["LUDIC_TEST_CANARY"] = canary("host")
    report = Report()
    pool = Recording(BubblewrapSandbox, workers=1)
    with pool, patch.object(tools, "session_pool", lambda sandbox: pool):
        judge = Judge(pool, make_verifier("exact"), LIMITS, "bubblewrap")
        for _ in range(rounds):
            stdio(judge, pool, report, checker=False)
            functions(judge, report)
            stdio(judge, pool, report, checker=True)
            python_tool(report)
            report.workers += worker_pids(pool)
    return report


def worker_pids(pool: SandboxPool) -> Iterator[int]:
    for sandbox in pool._idle["program"]:
        pid = sandbox.worker_pid
        if pid is not None:
            yield pid


if __name__ == "__main__":
    print(json.dumps(vars(run_episodes(int(sys.argv[1])))))
