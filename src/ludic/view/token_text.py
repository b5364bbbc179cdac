"""What a token says, by a run's own tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ludic.inference.tiny import byte_symbols
from ludic.view.folders import RunPlace, ViewError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LARGEST = 128 << 20


class TokenTexts:
    """The text of every token of one tokenizer. Bytes that are no whole character are shown as
    such, `\\xe2\\x96`, so that nothing looks like a replacement character that is none."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        text = path.read_text(encoding="utf-8")
        self._tokenizer = Tokenizer.from_str(text)
        self._piece = _piece_reader(json.loads(text))
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self.special = {number for number, token in added.items() if token.special}

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """The texts of these ids."""
        return {number: self.text(number) for number in set(ids)}

    def text(self, number: int) -> str:
        """The text of one id."""
        if (added := self._added.get(number)) is not None:
            return added
        piece = self._tokenizer.id_to_token(number) if number >= 0 else None
        if piece is None:
            return f"⟨{number}⟩"
        return self._piece(piece)


def _piece_reader(data: Any) -> Callable[[str], str]:
    decoder = json.dumps(data.get("decoder"))
    if "ByteLevel" in decoder:
        table = {char: byte for byte, char in enumerate(byte_symbols())}

        def byte_level(piece: str) -> str:
            if all(c in table for c in piece):
                return readable(bytes(table[c] for c in piece))
            return piece

        return byte_level

    def spaced(piece: str) -> str:
        if byte := _BYTE.fullmatch(piece):
            return readable(bytes([int(byte[1], 16)]))
        return piece.replace("\u2581", " ")

    return spaced


def readable(data: bytes) -> str:
    """UTF-8 as text, and what is none of it as escapes."""
    return data.decode("utf-8", "backslashreplace")


def texts_of(run: RunPlace) -> TokenTexts | None:
    """The texts of the run's tokenizer: beside the rollouts, or with a checkpoint. None if there is
    none, or it cannot be read."""
    saved = (run.path / "checkpoints").glob("*/step-*/model/tokenizer.json")
    for path in (run.path / "rollouts" / "tokenizer.json", *sorted(saved, reverse=True)):
        with suppress(ViewError, OSError):
            real = run.confined(path)
            stat = real.stat()
            if stat.st_size < _LARGEST and (texts := _read(real, stat.st_mtime)) is not None:
                return texts
    return None


@lru_cache(maxsize=32)
def _read(path: Path, modified: float) -> TokenTexts | None:
    try:
        return TokenTexts(path)
    except Exception:  # whatever is wrong with it, the ids can be shown
        return None
