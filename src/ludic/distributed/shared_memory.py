"""Weights as a safetensors file in shared memory: the plane for machines without a GPU."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

_PREFIX = "ludic-weights-"


def shared_folder() -> Path:
    """Where such files are put: memory where the system has a folder for it."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def write_shared(weights: Mapping[str, Tensor]) -> Path:
    """Writes the tensors to a new file that only this user can read; the caller removes it."""
    from safetensors.torch import save_file

    path = shared_folder() / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}.safetensors"
    path.touch(mode=0o600, exist_ok=False)
    try:
        save_file({n: t.detach().cpu().contiguous() for n, t in weights.items()}, path)
        path.chmod(0o600)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def open_shared(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of such a file, mapped and not copied. No other file is opened."""
    if path.parent != shared_folder() or not path.name.startswith(_PREFIX):
        raise ValueError(f"{path} is not a file of weights in shared memory")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (not a dict)
            yield name, opened.get_tensor(name)
