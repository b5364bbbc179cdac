"""Files of lines that survive a kill: plain, or compressed in blocks of whole lines, each of which
can be read alone: gzip members (`.gz`) or zstd frames (`.zst`)."""

from __future__ import annotations

import gzip
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import zstandard

from ludic.errors import SerializationError

_READ = 1 << 18
_BLOCK = 1 << 20
_MAGIC = {".zst": b"\x28\xb5\x2f\xfd", ".gz": b"\x1f\x8b\x08"}
"""How the blocks of a compressed file begin."""


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


def read_rows(
    path: str | Path, what: str, *, on_cut: Literal["warn", "error"] = "warn"
) -> Iterator[tuple[Any, str]]:
    """What each line is as JSON, and its place for errors. A file that is cut in its last line is a
    `CutFileWarning`, or an error; its message calls what was read `what`."""
    for number, (line, whole) in enumerate(read_lines(Path(path)), start=1):
        where = f"{path}, line {number}"
        if whole:
            yield parse_line(line, where), where
            continue
        cut = "the file ends in the middle of this line" if line else "the file breaks off here"
        message = f"{where}: {cut}; the {number - 1} {what} before it are whole and were read"
        if on_cut == "error":
            raise SerializationError(message)
        warnings.warn(message, CutFileWarning, stacklevel=3)


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
    if path.suffix not in _MAGIC and not _is_json(rest):
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
    """Pieces of text. In a compressed file, each is a block and comes with its offset; the last one
    of a file that breaks off is not whole, and nothing is taken from a zstd frame that does."""
    with open(path, "rb") as file:
        if path.suffix not in _MAGIC:
            while data := file.read(_READ):
                yield 0, data, True
            return
        start, size = 0, os.fstat(file.fileno()).st_size
        while start < size:
            try:
                block, whole = _block(file, start, path.suffix)
            except DamagedBlockError as exc:
                raise SerializationError(f"{path}: damaged after byte {start}: {exc}") from exc
            if whole or path.suffix == ".gz":
                yield start, block.text, True
            if not whole:
                yield start, b"", False
                return
            start += block.length


def _is_json(line: bytes) -> bool:
    try:
        parse_line(line, "")
    except SerializationError:
        return False
    return True


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
            yield from _plain_blocks(file, start)
            return
        while start < size:
            why = "the block breaks off"
            try:
                block, whole = _block(file, start, path.suffix)
            except DamagedBlockError as exc:
                why, whole = str(exc), False
            if whole:
                yield block
                start += block.length
                continue
            following = _next_block(file, start + 1, size, path.suffix)
            if following is None:
                return
            yield Damage(start, following - start, why)
            start = following


def read_block(path: Path, start: int, length: int) -> bytes:
    """The text of one block; raises `ValueError` where the file no longer has it."""
    with open(path, "rb") as file:
        if path.suffix not in _MAGIC:
            file.seek(start)
            return file.read(length)
        try:
            block, whole = _block(file, start, path.suffix)
        except DamagedBlockError as exc:
            raise ValueError(f"{path.name} changed at byte {start}: {exc}") from exc
    if not whole or block.length != length:
        raise ValueError(f"{path.name} changed at byte {start}")
    return block.text


def _block(file: BinaryIO, start: int, suffix: str) -> tuple[Block, bool]:
    """The block at `start`, and whether it is whole: the file may end within it."""
    block, parts = Inflating(suffix), list[bytes]()
    file.seek(start)
    while not block.done and (data := file.read(_READ)):
        parts.append(block.take(data))
    return Block(start, block.used, b"".join(parts)), block.done


def _next_block(file: BinaryIO, start: int, size: int, suffix: str) -> int | None:
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
            if _block(file, start, suffix)[1]:
                return start
        except DamagedBlockError:
            pass
        start += 1
    return None


def _plain_blocks(file: BinaryIO, start: int) -> Iterator[Block]:
    """Lines of a file that is not compressed, about a megabyte at a time."""
    file.seek(start)
    rest = b""
    while data := file.read(_BLOCK):
        lines, end, rest_of = (rest + data).rpartition(b"\n")
        if not end:
            rest = rest_of
            continue
        text = lines + end
        yield Block(start, len(text), text)
        start += len(text)
        rest = rest_of


LARGEST_BLOCK = 1 << 28
"""How many bytes of text a block may hold."""
LONGEST_LINE = LARGEST_BLOCK // 2
"""How long a line may be that is written: with what else is in its block, it can be read."""
_STEP = 1 << 10
"""How many bytes are inflated at a time. zstd's blocks hold at most 128 KB and take at least 4
bytes, gzip's text is at most 1,032 times as long: a step gives at most 32 MB."""
_WINDOW = 1 << 27


class DamagedBlockError(SerializationError):
    """A block that is not what its beginning says, or is too large."""


class Inflating:
    """One block of a file that ends with `suffix` (`.zst` or `.gz`), given piece by piece, and
    inflated within a limit: a file may come from anyone, and 100 KB can stand for gigabytes.

    `done` once the block has ended; `used` is how many bytes it took, `rest` what followed it in
    the last piece.
    """

    def __init__(self, suffix: str) -> None:
        self._inflate: Any = (
            zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
            if suffix == ".zst"
            else zlib.decompressobj(wbits=31)
        )
        self.used = self._size = 0
        self.rest = b""

    @property
    def done(self) -> bool:
        return bool(self._inflate.eof)

    def take(self, data: bytes) -> bytes:
        """The text of the next piece; raises `DamagedBlockError`."""
        texts: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            try:
                texts.append(self._inflate.decompress(data[at : at + _STEP]))
            except (zlib.error, zstandard.ZstdError) as exc:
                raise DamagedBlockError(str(exc)) from exc
            at += _STEP
            self._size += len(texts[-1])
            if self._size > LARGEST_BLOCK:
                raise DamagedBlockError(f"a block of over {LARGEST_BLOCK >> 20} MB of text")
        self.rest = self._inflate.unused_data + data[at:] if self.done else b""
        self.used += len(data) - len(self.rest)
        return b"".join(texts)
