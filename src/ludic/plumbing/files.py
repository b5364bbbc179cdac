"""Files: replaced as a whole, on the disk when that matters, and their checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

PIECE = 1 << 24
_READ = 1 << 20


def file_checksum(path: Path) -> str:
    """The SHA-256 of the SHA-256s of every 16 MiB of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return sha256(b"".join(piece_digests(file.fileno()))).hexdigest()


def piece_digests(handle: int) -> list[bytes]:
    """The SHA-256 of every 16 MiB of an open file.

    As many threads as there are processors take it: one takes seconds for a gigabyte, and whoever
    publishes or saves weights waits for it.
    """
    starts = range(0, os.fstat(handle).st_size, PIECE)

    def digest(start: int) -> bytes:
        summed, end = sha256(), start + PIECE
        while start < end and (block := os.pread(handle, min(_READ, end - start), start)):
            summed.update(block)
            start += len(block)
        return summed.digest()

    if len(starts) < 2:
        return [digest(start) for start in starts]
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as threads:
        return list(threads.map(digest, starts))


def boot_id() -> str:
    """Names this boot of the machine; empty where the system does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Gives a path to write to, which takes the place of `path` when the block ends.

    Whoever opens `path`, and whoever dies meanwhile, leaves the old file or the new one, never a
    part; if the block raises, it is the old one. That holds for processes. With `durable` it holds
    for the machine, too: content and name are on the disk when the block has ended. The temporary
    name has the same ending, for writers that go by that.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


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
