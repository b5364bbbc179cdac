"""Text to token ids and back, with a Hugging Face fast tokenizer.

Text is cut at the special tokens, and the pieces between them are encoded one by one and cached:
system prompts and observations recur, and tokenising is expensive. The ids are those of encoding
the whole text. Tokenizers for which this does not hold are detected when the codec is made, and
their texts are encoded whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from ludic.errors import TemplateError

GUARD = "\ufdd0"
"""Marks text that only looks like a special token. A code point that Unicode keeps for internal
use; where a text does hold it, it is doubled, so nothing is lost."""

_GUARDED = re.compile(f"{GUARD}({GUARD}?)")
_CACHED_PIECES = 4096
_LONGEST_CACHED = 16_384
_LONGEST_KEPT = 1024
_LONGEST_DECODED = 512
_PROBES = ("user\nHi,  you", "\n", " a", "a", "\n\nÉa\t", "\u2581x", "  ")


class TokenCodec:
    """Encodes and decodes for one tokenizer. Safe to share between threads.

    It works on a copy of the tokenizer's backend, so that a truncation or padding that other
    code sets on the tokenizer cannot cut a prompt.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer (it has no "
                "backend_tokenizer): load one with AutoTokenizer.from_pretrained(...)"
            )
        self._backend = _copy(backend)
        added = self._backend.get_added_tokens_decoder()
        specials = {t.content: (i, t) for i, t in added.items() if t.special and len(t.content) > 1}
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        self.special_texts: tuple[str, ...] = tuple(specials)
        self.special_id: dict[str, int] = {text: index for text, (index, _) in specials.items()}
        self._lstrip = frozenset(text for text, (_, t) in specials.items() if t.lstrip)
        self._rstrip = frozenset(text for text, (_, t) in specials.items() if t.rstrip)
        self.special_pattern = literal_pattern(specials)
        self._split: Callable[[str], list[str]] = (
            re.compile(f"({self.special_pattern.pattern})").split if specials else lambda t: [t]
        )
        self._anchor = ""
        self._cached_piece = lru_cache(maxsize=_CACHED_PIECES)(self._encode_piece)
        self._cached_text = lru_cache(maxsize=_CACHED_PIECES)(self._decode)
        self._whole = not self._pieces_are_exact()
        # What a group of episodes hears next is often the same.
        self._kept_ids = lru_cache(maxsize=_CACHED_PIECES)(lambda text: tuple(self._encode(text)))

    def guard(self, text: str, pattern: re.Pattern[str] | None = None) -> str:
        """Marks every special token spelled in `text` (those of `pattern`, if given; `NOTHING`
        leaves them all), so that `encode` spells it in ordinary tokens. `unguard` is the inverse.
        Text that did not come from here must be guarded before it is encoded."""
        if GUARD in text:
            text = text.replace(GUARD, GUARD + GUARD)
        pattern = pattern or self.special_pattern
        if pattern.search(text) is None:
            return text
        return pattern.sub(lambda m: f"{m[0][0]}{GUARD}{m[0][1:]}", text)

    def encode(self, text: str) -> list[int]:
        """The ids of a text in which `guard` may have marked parts."""
        if len(text) <= _LONGEST_KEPT:
            return list(self._kept_ids(text))
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if self._whole:
            return self._encode_whole(text)
        ids: list[int] = []
        for index, piece in enumerate(self._pieces(text)):
            if index % 2:
                ids.append(self.special_id[piece])
            elif piece:
                encode = self._cached_piece if len(piece) <= _LONGEST_CACHED else self._encode_piece
                ids.extend(encode(piece, index == 0))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens spelled out."""
        if len(token_ids) <= _LONGEST_DECODED:
            return self._cached_text(tuple(token_ids))
        return self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def _pieces(self, text: str) -> list[str]:
        """Ordinary text and special tokens in turn; the even places hold ordinary text."""
        pieces = self._split(text)
        if self._lstrip or self._rstrip:
            for index in range(1, len(pieces), 2):
                if pieces[index] in self._lstrip:
                    pieces[index - 1] = pieces[index - 1].rstrip()
                if pieces[index] in self._rstrip:
                    pieces[index + 1] = pieces[index + 1].lstrip()
        return pieces

    def _encode_piece(self, piece: str, first: bool) -> Sequence[int]:
        if GUARD in piece:
            return array("q", _ids(self._literal, unguard(piece)))
        if first or not self._anchor:
            return array("q", _ids(self._backend, piece))
        # Some tokenizers mark the beginning of a text: put a special token there and drop it.
        return array("q", _ids(self._backend, self._anchor + piece)[1:])

    def _encode_whole(self, text: str) -> list[int]:
        if GUARD in text and unguard(text) != text.replace(GUARD + GUARD, GUARD):
            raise TemplateError(
                "a message spells a special token, and this tokenizer cannot encode it as "
                "ordinary text: remove it from the content"
            )
        return _ids(self._backend, unguard(text))

    @cached_property
    def _literal(self) -> Any:
        """A backend that does not know special tokens, for text that only looks like them."""
        literal = _copy(self._backend)
        literal.encode_special_tokens = True
        return literal

    def _pieces_are_exact(self) -> bool:
        """Whether encoding piece by piece gives the ids of encoding the whole, on samples."""
        if not self.special_texts:
            return True
        usable = [t for t in self.special_texts if t not in self._lstrip and t not in self._rstrip]
        anchor = usable[0] if usable else self.special_texts[0]
        anchored = [_ids(self._backend, anchor + p) for p in _PROBES]
        bare = [_ids(self._backend, p) for p in _PROBES]
        if any(a[1:] != b for a, b in zip(anchored, bare, strict=True)):
            self._anchor = anchor
        self._whole = False
        for token in self.special_texts:
            sample = token.join(("x", *_PROBES, *_PROBES[::-1], ""))
            if self._encode(sample) != _ids(self._backend, sample):
                return False
        return True


def unguard(text: str) -> str:
    """The text as it was before `TokenCodec.guard`."""
    return _GUARDED.sub(r"\1", text) if GUARD in text else text


def literal_pattern(texts: Any) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing when there are none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


NOTHING = literal_pattern(())
"""Matches no text."""


def _ids(backend: Any, text: str) -> list[int]:
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    except TypeError as exc:
        raise TemplateError(
            f"this text cannot be encoded (a lone surrogate?): {text[:80]!r}"
        ) from exc
    return ids


def _copy(backend: Any) -> Any:
    copied = type(backend).from_str(backend.to_str())
    copied.no_truncation()
    copied.no_padding()
    return copied
