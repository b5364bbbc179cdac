"""Compressed blocks, inflated within a limit: a file may come from anyone, and 100 KB of zstd can
stand for gigabytes."""

from __future__ import annotations

import zlib
from typing import Any

import zstandard

from ludic.errors import SerializationError

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
    """One block of a file that ends with `suffix` (`.zst` or `.gz`), given piece by piece.

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
