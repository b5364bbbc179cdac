"""Folders in shared memory that servers on this machine read, and that nobody has to clean up.

An owner keeps its folder's file `lock` locked. A lock ends with its process, however that ends:
a folder whose lock is free was left behind, and is removed by the next who makes one.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from ludic.errors import PublishError

_PREFIX = "ludic-publish-"
_LOCK = "lock"
_WEIGHTS = "weights.safetensors"


def shared_folder() -> Path:
    """Where such folders are put: memory where the system has a folder for it."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


class OwnedFolder:
    """A new folder under `parent` (default: shared memory), private to the user. It is removed at
    the end of this object, or of the process."""

    def __init__(self, parent: str | Path | None = None) -> None:
        self.parent = shared_folder() if parent is None else Path(parent)
        for path in self.parent.glob(f"{_PREFIX}*"):
            if is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        made = self.parent / f".{name}"
        made.mkdir(mode=0o700)
        lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under this name others look whether it is abandoned: not before it is locked.
        self.path = made.rename(self.parent / name)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Removes the folder and what is in it."""
        self._end()


def is_abandoned(path: Path) -> bool:
    """Whether nobody keeps the folder `path`, or it is gone."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # another user's: not ours to judge
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def write_shared(weights: Mapping[str, Tensor]) -> tuple[Path, OwnedFolder]:
    """Writes the tensors to a file in a new folder, which the caller closes."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = OwnedFolder()
    needed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    try:
        if needed > shutil.disk_usage(folder.parent).free:
            raise OSError("No space left")
        path = folder.path / _WEIGHTS
        save_file({n: t.detach().cpu().contiguous() for n, t in weights.items()}, path)
    except BaseException as exc:
        folder.close()
        if isinstance(exc, SafetensorError | OSError) and "No space left" in str(exc):
            free = shutil.disk_usage(folder.parent).free
            raise PublishError(
                f"the weights need {needed / 2**20:,.1f} MiB in {folder.parent}, and "
                f"{free / 2**20:,.1f} MiB are free there: give it more (Docker: --shm-size, or "
                "--ipc=host), or publish over another plane (ipc for weights on the servers' GPU, "
                "nccl for those on others)"
            ) from exc
        raise
    return path, folder


def open_shared(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of such a file, mapped and not copied. No other file is opened."""
    folder = path.parent
    ours = folder.parent == shared_folder() and folder.name.startswith(_PREFIX)
    if not ours or path.name != _WEIGHTS:
        raise ValueError(f"{path} is not a file of weights in shared memory")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (not a dict)
            yield name, opened.get_tensor(name)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # else a fork of the owner ends
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
