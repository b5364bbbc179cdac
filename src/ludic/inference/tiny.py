"""A tokenizer and a model built in code, without a download: small enough for tests on a laptop."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from ludic.errors import ConfigError
from ludic.inference.templates.plain_tokenizer import PlainTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

TINY_VOCAB_SIZE = 258
"""The 256 bytes and the two ChatML tokens: the vocabulary of `tiny_tokenizer()`."""

CHATML_TEMPLATE = (files("ludic.inference") / "chatml.jinja").read_text(encoding="utf-8")


def tiny_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level ChatML tokenizer: one id per UTF-8 byte, and lossless on any text.

    `words` become whole tokens wherever they occur, which keeps a demo's texts short. They must be
    printable ASCII. Ids: 0-255 the bytes, then `<|im_start|>`, `<|im_end|>` (end and padding), then
    the words in order.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(words),
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def plain_tiny_tokenizer() -> PlainTokenizer:
    """`tiny_tokenizer()` without transformers, some versions of which import torch for it."""
    special = dict.fromkeys(("eos_token", "pad_token"), "<|im_end|>")
    return PlainTokenizer(_backend(), special, TINY_VOCAB_SIZE - 1, CHATML_TEMPLATE, "")


def _backend(words: Sequence[str] = ()) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    for word in words:
        if not (word and word.isascii() and all(c.isprintable() or c == "\n" for c in word)):
            raise ConfigError(f"tiny_tokenizer: the word {word!r} must be printable ASCII")
    if len(set(words)) != len(words):
        raise ConfigError("tiny_tokenizer: a word is listed twice")
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.add_tokens([AddedToken(w, normalized=False) for w in words])
    return tokenizer


def tiny_model(
    seed: int = 0,
    *,
    vocab_size: int = TINY_VOCAB_SIZE,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_position_embeddings: int = 1024,
    initializer_range: float = 0.1,
) -> Qwen2ForCausalLM:
    """A small Qwen2 with random float32 weights and tied embeddings, the same for the same seed.

    Pass `vocab_size=len(tokenizer)` for a tokenizer with extra words. `initializer_range` is
    larger than the usual 0.02, with which a model this small all but ignores what it reads.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TINY_VOCAB_SIZE - 1,
        pad_token_id=TINY_VOCAB_SIZE - 1,
        dtype="float32",
    )
    # Initialisation draws from torch's global state: fork it, so that nobody else's changes.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return model.float().eval()


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
