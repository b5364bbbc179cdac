"""The whole blocks of a file that may still grow, be cut off, or be damaged in places."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ludic.rollouts.inflating import DamagedBlockError, Inflating

_READ = 1 << 18
_PLAIN_BLOCK = 1 << 20
_MAGIC = {".zst": b"\x28\xb5\x2f\xfd", ".gz": b"\x1f\x8b\x08"}


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines, and where they are stored."""

    start: int
    length: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that cannot be read, though what follows them can."""

    start: int
    length: int
    why: str


def whole_blocks(path: Path, start: int = 0) -> Iterator[Block | Damage]:
    """The blocks from byte `start` on, up to one that is not finished yet. Damage is skipped, and
    said, if a readable block follows it; at the end of a file it may be a block in the writing."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix not in _MAGIC:
            yield from _plain(file, start)
            return
        while start < size:
            why, found = "the block breaks off", None
            try:
                found = _block(file, start, path.suffix)
            except DamagedBlockError as exc:
                why = str(exc)
            if found is None:
                following = _resume(file, start + 1, size, path.suffix)
                if following is None:
                    return
                yield Damage(start, following - start, why)
                start = following
                continue
            yield found
            start += found.length


def read_block(path: Path, start: int, length: int) -> bytes:
    """The text of one block; raises `ValueError` where the file no longer has it."""
    with open(path, "rb") as file:
        if path.suffix not in _MAGIC:
            file.seek(start)
            return file.read(length)
        try:
            found = _block(file, start, path.suffix)
        except DamagedBlockError as exc:
            raise ValueError(f"{path.name} changed at byte {start}: {exc}") from exc
    if found is None or found.length != length:
        raise ValueError(f"{path.name} changed at byte {start}")
    return found.text


def _block(file: BinaryIO, start: int, suffix: str) -> Block | None:
    """The block at `start`; None if the file ends within it."""
    block, parts = Inflating(suffix), list[bytes]()
    file.seek(start)
    while not block.done:
        data = file.read(_READ)
        if not data:
            return None
        parts.append(block.take(data))
    return Block(start, block.used, b"".join(parts))


def _resume(file: BinaryIO, start: int, size: int, suffix: str) -> int | None:
    """Where the next readable block begins."""
    magic = _MAGIC[suffix]
    while start < size:
        file.seek(start)
        data = file.read(_READ)
        at = data.find(magic)
        if at < 0:
            start += max(len(data) - len(magic) + 1, 1)
            continue
        start += at
        try:
            if _block(file, start, suffix) is not None:
                return start
        except DamagedBlockError:
            pass
        start += 1
    return None


def _plain(file: BinaryIO, start: int) -> Iterator[Block]:
    """Lines of a file that is not compressed, about a megabyte at a time."""
    file.seek(start)
    rest = b""
    while data := file.read(_PLAIN_BLOCK):
        lines, end, rest_of = (rest + data).rpartition(b"\n")
        if not end:
            rest = rest_of
            continue
        text = lines + end
        yield Block(start, len(text), text)
        start += len(text)
        rest = rest_of
