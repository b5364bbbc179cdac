"""Weights as a safetensors file in shared memory: the plane for machines without a GPU.

A process keeps one lock beside its files. A lock ends with its process, however that ends: what
belongs to a free one was left behind, and is removed by the next who writes.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch import Tensor

from ludic.errors import PublishError

_PREFIX = "ludic-weights-"


def shared_folder() -> Path:
    """Where such files are put: memory where the system has a folder for it."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def write_shared(weights: Mapping[str, Tensor]) -> Path:
    """Writes the tensors to a new file that only this user can read; the caller removes it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = shared_folder()
    _remove_abandoned(folder)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if needed > shutil.disk_usage(folder).free:
        raise _no_room(folder, needed)
    path = folder / f"{_owner(folder, os.getpid())}-{secrets.token_hex(8)}.safetensors"
    path.touch(mode=0o600, exist_ok=False)
    try:
        save_file({n: t.detach().cpu().contiguous() for n, t in weights.items()}, path)
        path.chmod(0o600)
    except BaseException as exc:
        path.unlink(missing_ok=True)
        if isinstance(exc, SafetensorError | OSError) and "No space left" in str(exc):
            raise _no_room(folder, needed) from exc
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


def is_free(lock: Path) -> bool:
    """Whether no process holds the file `lock`, or it is gone."""
    try:
        opened = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # another user's: not ours to judge
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(opened)
    return True


@cache
def _owner(folder: Path, pid: int) -> str:
    """How the names of this process's files in `folder` begin. Locked as long as it lives."""
    name = f"{_PREFIX}{pid}-{secrets.token_hex(4)}"
    made = folder / f".{name}.made"
    fcntl.flock(os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), fcntl.LOCK_EX)
    # Under this name others look whether it is free: not before it is locked.
    lock = made.rename(_lock_of(folder, name))
    atexit.register(_remove_own, lock, pid)
    return name


def _lock_of(folder: Path, owner: str) -> Path:
    return folder / f".{owner}.lock"


def _remove_own(lock: Path, pid: int) -> None:
    if os.getpid() == pid:  # else a fork of the owner ends
        lock.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Removes what processes that are gone left in `folder`."""
    files = [(f, f.name.rpartition("-")[0]) for f in folder.glob(f"{_PREFIX}*.safetensors")]
    locks = [(f, f.name[1 : -len(".lock")]) for f in folder.glob(f".{_PREFIX}*.lock")]
    for path, owner in files + locks:
        if is_free(_lock_of(folder, owner)):
            with suppress(OSError):  # another user's, or removed meanwhile
                path.unlink()


def _no_room(folder: Path, needed: int) -> PublishError:
    free = shutil.disk_usage(folder).free
    return PublishError(
        f"the weights need {needed / 2**20:,.1f} MiB in {folder}, and {free / 2**20:,.1f} MiB are "
        "free there: give it more (Docker: --shm-size, or --ipc=host), or publish over another "
        "plane (ipc for weights on the servers' GPU, nccl for those on others)"
    )
