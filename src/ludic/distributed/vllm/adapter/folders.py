"""Folders with adapters that servers on this machine read, and that nobody has to clean up.

A publisher's folders lie under one of its own, whose file `lock` it keeps locked. A lock ends with
its process, however that ends: what lies under a free one was left behind, and is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.vllm.shared_memory import is_free, shared_folder

_PREFIX = "ludic-adapters-"
_LOCK = "lock"


class AdapterFolders:
    """Makes and removes adapters' folders, private to the user, under `parent` (default: shared
    memory). At the end of the process, or of this object, all of them are removed."""

    def __init__(self, parent: str | Path | None = None) -> None:
        self.parent = shared_folder() if parent is None else Path(parent)
        remove_abandoned(self.parent)
        token = secrets.token_hex(8)
        made = self.parent / f".{_PREFIX}{token}"
        made.mkdir(mode=0o700)
        lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under this name others look whether it is abandoned: not before it is locked.
        self.path = made.rename(self.parent / f"{_PREFIX}{token}")
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def write(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """A new folder that PEFT and vLLM read as an adapter. No pickle."""
        from safetensors.torch import save_file

        folder = self.path / name
        folder.mkdir(mode=0o700)
        try:
            plain = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
            save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            (folder / "adapter_config.json").write_text(json.dumps(dict(config), indent=1))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def remove(self, folder: Path) -> None:
        """Removes one; one that is gone is no error."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Removes them all."""
        self._end()


def remove_abandoned(parent: Path) -> list[Path]:
    """Removes what processes that are gone left under `parent`."""
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        if is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def is_abandoned(path: Path) -> bool:
    """Whether nobody keeps the publisher's folder `path`, or it is gone."""
    return is_free(path / _LOCK)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner ends, not the owner
        return
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        os.close(lock)
