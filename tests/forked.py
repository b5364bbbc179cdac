"""Scripts in processes forked from one that has imported torch and transformers already.

An interpreter of its own spends more on these imports than most scripts on their work. Not for a
test that looks at how the interpreter starts or shuts down: a fork leaves without `atexit`, and
what is read from the environment on import (Hugging Face's addresses) stays as it was.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "peft",
    "pytest",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "matplotlib.figure",
    "ludic.cli.app",
    "ludic.inference.tiny",
    "ludic.distributed",
    "ludic.runs.run",
    "ludic.sharding.fsdp",
    "ludic.training.trainer",
)
"""What most scripts need; each imports the rest by itself."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(IMPORTED))


def start(
    script: Path | str,
    *arguments: object,
    printed: Path | int,
    where: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Runs a script as `__main__` in the folder `where`, or the module of this name as `python -m`
    does; both of its outputs go into `printed`, a file or a descriptor. The variables of
    `environment` come on top of this process's."""
    words = [str(script), *map(str, arguments)]
    settings = {**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1"}
    with open(printed, "wb", closefd=isinstance(printed, Path)) as output:
        sent = _Sent(output.fileno())
        args = (words, isinstance(script, str), sent, where, settings)
        process = _forks.Process(target=_run, args=args)
        process.start()
    return process


class _Sent:
    """A descriptor that goes along to another process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> Any:
        return DupFd(self.descriptor)

    def __setstate__(self, state: Any) -> None:
        self.descriptor = state.detach()


def _run(
    words: list[str], is_module: bool, output: _Sent, where: Path, environment: dict[str, str]
) -> None:
    os.dup2(output.descriptor, 1)
    os.dup2(output.descriptor, 2)
    os.close(output.descriptor)
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the folder that TMPDIR names now
    sys.argv = words
    if is_module:
        sys.path.insert(0, str(where))
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


class Forked:
    """A process as `subprocess.Popen` has it, with both of its outputs in `stdout`."""

    def __init__(
        self,
        script: Path | str,
        *arguments: object,
        where: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        out, printed = os.pipe()
        self.stdout: IO[str] = os.fdopen(out)
        try:
            self._process = start(
                script, *arguments, printed=printed, where=where, environment=environment
            )
        finally:
            os.close(printed)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, sign: signal.Signals) -> None:
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, sign)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """All that is still to come, until the process has ended; it is killed if it has not."""
        timer = threading.Timer(timeout, self._process.kill)
        timer.start()
        try:
            text = self.stdout.read()
        finally:
            timer.cancel()
            self.stdout.close()
        self.wait(timeout)
        return text, None


def run_ranks(
    script: Path | str,
    *arguments: object,
    ranks: int = 2,
    timeout_s: float = 400,
    where: Path = ROOT,
) -> str:
    """What the ranks of `end_ranks` printed, none of which may fail."""
    codes, texts = end_ranks(script, *arguments, ranks=ranks, timeout_s=timeout_s, where=where)
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(text[-4000:] for text in texts)
    return "".join(texts)


def end_ranks(
    script: Path | str,
    *arguments: object,
    ranks: int = 2,
    timeout_s: float = 400,
    where: Path = ROOT,
) -> tuple[list[int | None], list[str]]:
    """Runs a script on ranks of one host, with the variables that torchrun sets; returns how each
    ended and what it printed. When one fails the others are told to end, and killed 30 s later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    with TemporaryDirectory() as folder:
        files = [Path(folder, f"rank-{rank}") for rank in range(ranks)]
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        processes = [
            start(
                script,
                *arguments,
                printed=file,
                where=where,
                environment={"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, **address},
            )
            for rank, file in enumerate(files)
        ]
        deadline = time.monotonic() + timeout_s
        running = list(processes)
        while running and all(process.exitcode in (None, 0) for process in processes):
            left = deadline - time.monotonic()
            if not wait([process.sentinel for process in running], max(left, 0)):
                break
            running = [process for process in running if process.exitcode is None]
        for process in running:
            process.terminate()
        for process in running:
            process.join(30)
            process.kill()
            process.join()
        return [process.exitcode for process in processes], [file.read_text() for file in files]
