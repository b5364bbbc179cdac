"""Scripts in processes forked from one that has imported torch and transformers already.

An interpreter of its own spends more on these imports than most scripts on their work. Not for a
test that looks at how a process starts or ends: a fork leaves without the interpreter's shutdown.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "peft",
    "pytest",
    "torch.distributed.fsdp",
    "ludic.inference.tiny",
    "ludic.distributed",
    "ludic.sharding.fsdp",
    "ludic.training.trainer",
)
"""What most scripts need; each imports the rest by itself."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(IMPORTED))


def start(
    script: Path,
    *arguments: object,
    printed: Path,
    where: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Runs a script as `__main__` in the folder `where`; both of its outputs go into the file
    `printed`. The variables of `environment` come on top of this process's."""
    words = [str(script), *map(str, arguments)]
    settings = {**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1"}
    process = _forks.Process(target=_run, args=(words, printed, where, settings))
    process.start()
    return process


def _run(words: list[str], printed: Path, where: Path, environment: dict[str, str]) -> None:
    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def run_ranks(
    script: Path,
    *arguments: object,
    ranks: int = 2,
    timeout_s: float = 400,
    where: Path = ROOT,
) -> str:
    """Runs a script on ranks of one host, with the variables that torchrun sets; returns what they
    printed. When one fails the others are killed."""
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
            process.kill()
            process.join()
        texts = [file.read_text() if file.exists() else "" for file in files]
    codes = [process.exitcode for process in processes]
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(text[-4000:] for text in texts)
    return "".join(texts)
