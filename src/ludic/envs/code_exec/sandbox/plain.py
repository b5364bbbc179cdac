"""A plain subprocess with limits: for machines without bubblewrap, when asked for by name.

It holds resource limits, a seccomp filter (no network, no looking into other processes, no signals
to them) and, if this process is root, a user id that owns nothing. It does not hide the file
system: a program reads whatever its user may read, and writes wherever its user may write.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from contextlib import suppress
from typing import ClassVar

from ludic.envs.code_exec.sandbox.base import SandboxUnavailableError
from ludic.envs.code_exec.sandbox.bubblewrap import (
    interpreter,
    launched,
    reachable_prefix,
    spare_user,
    worker_settings,
)
from ludic.envs.code_exec.sandbox.worker import BOOTSTRAP, Sandbox, WorkerProcess

WARNING = (
    "the sandbox 'plain' is a subprocess with limits: programs can read every file that their user "
    "can, and write where it can. Use 'bubblewrap' for programs that a model wrote"
)


class PlainSandbox(Sandbox):
    """Limits without isolation: see the module. Warns once per process."""

    name: ClassVar[str] = "plain"

    def __init__(self) -> None:
        super().__init__()
        self._folder: str | None = None

    def start_worker(self) -> WorkerProcess:
        warnings.warn(WARNING, RuntimeWarning, stacklevel=2)
        if sys.platform != "linux":
            raise SandboxUnavailableError("the sandbox 'plain' needs Linux")
        uid, python = spare_user(), interpreter()
        self._folder = tempfile.mkdtemp(prefix="ludic-plain-")
        prefix, binds = reachable_prefix(python, uid)
        if uid is not None:
            os.chown(self._folder, uid, uid)
        executable = python.executable.replace(python.prefix, prefix, 1)
        command = [executable, "-s", "-X", "utf8", "-c", BOOTSTRAP]
        if uid is not None:
            command = launched(command, uid, binds, None)
        return WorkerProcess(command, worker_settings("plain", self._folder, "plain"))

    def close(self) -> None:
        super().close()
        if self._folder is not None:
            with suppress(OSError):
                shutil.rmtree(self._folder)
            self._folder = None
