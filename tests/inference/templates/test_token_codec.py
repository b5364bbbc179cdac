from __future__ import annotations

import string
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ludic.inference.templates.token_codec import TokenCodec

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


ASCII = st.lists(
    st.sampled_from(["'s", "'LL", "  ", "\n\n", " \n", "\r\n", "\t", "12345", " king", "---", "<"])
    | st.text(string.printable + "\x00\x1c\x7f", max_size=6),
    max_size=12,
).map("".join)


@cache
def codec(kind: str) -> TokenCodec:
    return TokenCodec(SimpleNamespace(backend_tokenizer=trained(kind)))


@pytest.mark.parametrize("kind", CUTTERS)
@given(text=ASCII)
def test_ascii_text_gets_the_ids_of_the_tokenizer_itself(kind: str, text: str) -> None:
    assert codec(kind).encode(text) == trained(kind).encode(text).ids


@given(text=ASCII)
def test_ascii_text_gets_the_ids_of_the_real_smollm2(text: str) -> None:
    backend, real = smollm2()
    assert real.encode(text) == backend.encode(text, add_special_tokens=False).ids


@cache
def smollm2() -> tuple[Any, TokenCodec]:
    from tools import smollm2 as real

    backend = Tokenizer.from_file(str(real.path() / "tokenizer.json"))
    return backend, TokenCodec(SimpleNamespace(backend_tokenizer=backend))
