from __future__ import annotations

import string
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ludic.inference.templates.ascii_words import AsciiWords

CORPUS = [
    "The king's board isn't empty, they'll play 12 moves; I've 345 left.\n\n  Then?\n",
    "def f(x):\n    return x + 10  # done\r\n\t'quoted' \"text\" <move>5</move> ---+---",
] * 4

WORDS = (
    r"(?i:'s|'t|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*before: Any, use_regex: bool = True, prefix: bool = False) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    return pre_tokenizers.Sequence([*before, last]) if before else last


CUTTERS = {
    "gpt2": byte_level(),
    "digits": byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "numbers": byte_level(pre_tokenizers.Digits(individual_digits=False)),
    "split": byte_level(pre_tokenizers.Split(Regex(WORDS), "isolated"), use_regex=False),
}


@cache
def trained(kind: str) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = CUTTERS[kind]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def words_of(kind: str) -> AsciiWords:
    made = AsciiWords.of(trained(kind))
    assert made is not None
    return made


ASCII = st.lists(
    st.sampled_from(["'s", "'LL", "  ", "\n\n", " \n", "\r\n", "\t", "12345", " king", "---", "<"])
    | st.text(string.printable + "\x00\x1c\x7f", max_size=6),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", CUTTERS)
@given(text=ASCII)
def test_ascii_text_gets_the_ids_of_the_tokenizer_itself(kind: str, text: str) -> None:
    assert words_of(kind).encode(text) == trained(kind).encode(text).ids


@given(text=ASCII)
def test_ascii_text_gets_the_ids_of_the_real_smollm2(text: str) -> None:
    backend, words = smollm2()
    assert words.encode(text) == backend.encode(text, add_special_tokens=False).ids


@cache
def smollm2() -> tuple[Any, AsciiWords]:
    from tools import smollm2 as real

    backend = Tokenizer.from_file(str(real.path() / "tokenizer.json"))
    words = AsciiWords.of(backend)
    assert words is not None
    return backend, words


def test_a_tokenizer_that_works_otherwise_has_no_such_encoder() -> None:
    tokenizer = Tokenizer.from_str(trained("gpt2").to_str())
    for cutter in (
        byte_level(prefix=True),
        pre_tokenizers.Metaspace(),
        byte_level(pre_tokenizers.Punctuation()),
        byte_level(pre_tokenizers.Split(Regex(r"\p{Lu}+"), "isolated"), use_regex=False),
        byte_level(pre_tokenizers.Split(Regex(r"[a[bc]]"), "isolated"), use_regex=False),
        byte_level(pre_tokenizers.Split(Regex(WORDS), "removed"), use_regex=False),
    ):
        tokenizer.pre_tokenizer = cutter
        assert AsciiWords.of(tokenizer) is None
    tokenizer.pre_tokenizer = CUTTERS["gpt2"]
    assert AsciiWords.of(tokenizer) is not None
    tokenizer.normalizer = normalizers.Lowercase()
    assert AsciiWords.of(tokenizer) is None
    tokenizer.normalizer = None
    tokenizer.model = models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    assert AsciiWords.of(tokenizer) is None


def test_an_encoder_that_would_differ_is_found_out() -> None:
    """A pattern that leaves characters unmatched: the tokenizer keeps them, findall would not."""
    tokenizer = Tokenizer.from_str(trained("gpt2").to_str())
    tokenizer.pre_tokenizer = byte_level(
        pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"), use_regex=False
    )
    assert AsciiWords.of(tokenizer) is None
