"""Files that are on the disk, not only in the system's memory, when a call returns."""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(path: Path, text: str) -> None:
    """Writes a file, and returns when its content is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Returns when a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Returns when all that is in the folder is on the disk: files first, then their folders."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))
