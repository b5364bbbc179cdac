"""Files of lines that survive a kill: plain, or compressed in blocks of whole lines, each of which
can be read alone: gzip members (`.gz`) or zstd frames (`.zst`)."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from ludic.errors import SerializationError
from ludic.rollouts.inflating import DamagedBlockError, Inflating

_CHUNK = 1 << 16
_BLOCK = 1 << 20
_COMPRESSED = (".gz", ".zst")


class CutFileWarning(UserWarning):
    """A file ends in the middle of a line: what stands before it was read."""


def read_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file, compressed or not, each with whether it is whole. Only the last can be
    broken; a compressed file that is damaged in the middle raises `SerializationError`."""
    rest, broken = b"", False
    for _, text, whole in _pieces(path):
        broken = not whole
        *lines, rest = (rest + text).split(b"\n")
        yield from ((line, True) for line in lines if line.strip())
    if rest.strip() or broken:
        yield rest, not broken and _is_json(rest)


def parse_line(line: bytes, where: str) -> Any:
    """One line as JSON; `where` names it in errors."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise SerializationError(f"{where}: not JSON: {exc}") from exc


def as_stored(path: Path, text: bytes) -> bytes:
    """The bytes that `text` becomes in a file of that name: one block."""
    if path.suffix == ".zst":
        return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(text)
    return gzip.compress(text, compresslevel=5, mtime=0) if path.suffix == ".gz" else text


def mend_last_line(path: Path) -> None:
    """Lets lines follow: completes a last line that lacks only its end, and removes what a killed
    run left unfinished."""
    size = keep = path.stat().st_size
    rest = b""
    for start, text, whole in _pieces(path):
        rest = (rest + text).rpartition(b"\n")[2]
        if not whole:
            keep, rest = start, b""
    if path.suffix not in _COMPRESSED and not _is_json(rest):
        keep, rest = size - len(rest), b""
    if keep < size:
        warnings.warn(
            f"{path}: an unfinished line of {size - keep} bytes at its end was cut off",
            CutFileWarning,
            stacklevel=3,
        )
        os.truncate(path, keep)
    if rest:
        with open(path, "ab") as file:
            file.write(as_stored(path, b"\n"))


def keep_lines(path: Path, keep: Callable[[Any], bool]) -> None:
    """Rewrites a file with only those lines whose JSON `keep` is true for, and without one that
    breaks off. Where all are kept, the file stays as it is."""
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    waiting, size, dropped = list[bytes](), 0, False
    try:
        with open(temporary, "wb") as file:
            for number, (line, whole) in enumerate(read_lines(path), start=1):
                if not whole:
                    continue
                if not keep(parse_line(line, f"{path}, line {number}")):
                    dropped = True
                    continue
                waiting.append(line + b"\n")
                size += len(line)
                if size >= _BLOCK:
                    file.write(as_stored(path, b"".join(waiting)))
                    waiting, size = [], 0
            if waiting:
                file.write(as_stored(path, b"".join(waiting)))
            file.flush()
            os.fsync(file.fileno())
        if dropped:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _pieces(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Pieces of text. In a compressed file, each comes with the offset at which its block begins,
    and the last one of a file that breaks off within a block is not whole. Nothing is taken from a
    zstd frame that breaks off."""
    with open(path, "rb") as file:
        if path.suffix not in _COMPRESSED:
            while data := file.read(_CHUNK):
                yield 0, data, True
            return
        start, data = 0, b""
        while data or (data := file.read(_CHUNK)):
            block, frame = Inflating(path.suffix), list[bytes]()
            while not block.done:
                if not data and not (data := file.read(_CHUNK)):
                    yield start, b"", False
                    return
                try:
                    text = block.take(data)
                except DamagedBlockError as exc:
                    raise SerializationError(f"{path}: damaged after byte {start}: {exc}") from exc
                data = block.rest
                if path.suffix == ".zst":
                    frame.append(text)
                else:
                    yield start, text, True
            if frame:
                yield start, b"".join(frame), True
            start += block.used


def _is_json(line: bytes) -> bool:
    try:
        parse_line(line, "")
    except SerializationError:
        return False
    return True
