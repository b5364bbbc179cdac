"""A quick way to encode ASCII text for byte-level BPE tokenizers.

Such a tokenizer cuts text into words with a regular expression and merges each word by itself, so
words can be remembered. Cutting is most of the cost, and for ASCII text the standard library's
regular expressions do it several times faster. Whether the ids are the tokenizer's own is tried
out on many texts when the encoder is made; if it is any other kind of tokenizer, there is none.
"""

from __future__ import annotations

import json
import random
import re
import string
from typing import Any

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_CLASSES = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}
_MOST_WORDS = 65_536

# Byte-level vocabularies spell bytes that do not print as letters from U+0100 on, in order.
_BYTE_LETTERS = {byte: 256 + n for n, byte in enumerate([*range(33), 127])}


class AsciiWords:
    """Encodes ASCII text that holds none of the tokenizer's added tokens."""

    def __init__(self, stages: list[re.Pattern[str]], backend: Any) -> None:
        self._stages = stages
        self._model = backend.model
        self._words: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, backend: Any) -> AsciiWords | None:
        """The encoder for a backend of the `tokenizers` package; None where it would not fit."""
        made = _stages(json.loads(backend.to_str()))
        if not made:
            return None
        words = cls(made, backend)
        same = (
            words.encode(t) == backend.encode(t, add_special_tokens=False).ids for t in _probes()
        )
        return words if all(same) else None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        parts = [text]
        for stage in self._stages:
            parts = (
                stage.findall(text)
                if len(parts) == 1
                else [word for part in parts for word in stage.findall(part)]
            )
        ids: list[int] = []
        known = self._words.get
        for word in parts:
            found = known(word)
            ids += self._learn(word) if found is None else found
        return ids

    def _learn(self, word: str) -> tuple[int, ...]:
        tokens = self._model.tokenize(word.translate(_BYTE_LETTERS))
        ids = tuple(token.id for token in tokens)
        if len(word) <= 64:
            if len(self._words) >= _MOST_WORDS:
                self._words = {}
            self._words[word] = ids
        return ids


def _stages(spec: Any) -> list[re.Pattern[str]] | None:
    """How the tokenizer cuts ASCII text, one pattern after another; None when that is not known
    to be all that it does."""
    model, normalizer = spec["model"], spec.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout") or model.get("byte_fallback"):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if normalizer is not None and normalizer.get("type") not in ("NFC", "NFKC"):
        return None  # those two leave ASCII as it is
    cutter = spec.get("pre_tokenizer") or {}
    steps = cutter["pretokenizers"] if cutter.get("type") == "Sequence" else [cutter]
    sources: list[str | None] = []
    for step in steps:
        sources += _sources(step)
    if not steps or steps[-1].get("type") != "ByteLevel" or None in sources:
        return None
    patterns = [_ascii_pattern(source) for source in sources if source is not None]
    return None if None in patterns else [p for p in patterns if p is not None]


def _sources(step: Any) -> list[str | None]:
    """The patterns of one step of cutting; [None] for a step that is not known."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [_GPT2_WORDS] if step.get("use_regex", True) else []
    if kind == "Digits":
        many = "" if step.get("individual_digits") else "+"
        return [rf"\p{{N}}{many}|[^\p{{N}}]+"]
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return [step["pattern"].get("Regex")]
    return [None]


def _ascii_pattern(source: str) -> re.Pattern[str] | None:
    """The same pattern for ASCII text only, in Python's syntax; None where that fails."""
    out: list[str] = []
    position, in_class = 0, False
    while position < len(source):
        escape = source[position : position + 5]
        if escape in _ASCII_CLASSES:
            ascii_class = _ASCII_CLASSES[escape]
            out.append(ascii_class if in_class else f"[{ascii_class}]")
            position += 5
            continue
        step = 2 if source[position] == "\\" else 1
        piece = source[position : position + step]
        if piece in (r"\p", r"\P"):
            return None
        if piece == "[":
            if in_class:
                return None  # nested classes are not Python's
            in_class = True
        elif piece == "]":
            in_class = False
        out.append(piece)
        position += step
    try:
        made = re.compile("".join(out), re.ASCII)
    except re.error:
        return None
    return made if made.groups == 0 else None


def _probes() -> list[str]:
    """Texts with every ASCII character, and with many ways in which words, digits, marks and
    white space meet."""
    chooser = random.Random(0)
    kinds = (string.ascii_letters, string.digits, string.punctuation, " ", " \n\t\r", "\n", "'")
    texts = ["".join(map(chr, range(128))), "".join(map(chr, range(127, -1, -1)))]
    for _ in range(200):
        runs = (
            chooser.choice(chooser.choice(kinds)) * chooser.choice((1, 1, 1, 2, 3))
            for _ in range(40)
        )
        texts.append("".join(runs))
    suffixes = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'x")
    texts += [f"I{s} you{s}  it{s}\n" for s in suffixes]
    return texts
