"""Programs that want to do harm. Each prints HARM where it has succeeded.

`{secret}` is a file of the host, `{host_pid}` the process that runs the tests, `{port}` where it
listens on loopback, `{abstract}` its abstract Unix socket, `{outside}` a path that must not come
to be, and `{token}` a word that names the attack's processes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from ludic.envs.code_exec.sandbox.base import RunStatus as S

PRELUDE = """
import ctypes, os, platform, signal, socket, subprocess, sys, time
def tried(work):
    try:
        return work()
    except (OSError, ValueError, PermissionError, subprocess.SubprocessError):
        return None
def harm(work):
    if tried(work):
        print("HARM", flush=True)
def call(x86_64, aarch64, *args):
    libc = ctypes.CDLL(None, use_errno=True)
    number = x86_64 if platform.machine() == "x86_64" else aarch64
    return libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in args]) >= 0
"""

ENDED = frozenset({S.OK, S.ERROR})
STOPPED = frozenset({S.WALL_TIME, S.CPU_TIME})
FULL = frozenset({S.PROCESSES, S.ERROR, *STOPPED})


@dataclass(frozen=True)
class Attack:
    """A program, and what it may be reported as. `isolated`: only a sandbox that hides the file
    system, the processes and the network promises to withstand it."""

    name: str
    program: str
    reported: frozenset[S]
    isolated: bool = False

    def source(self, **facts: object) -> bytes:
        return (PRELUDE + textwrap.dedent(self.program).format(**facts)).encode()
