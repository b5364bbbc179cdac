"""The tokenizer and the model that are made in code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import ConfigError
from ludic.inference.templates.plain_tokenizer import PlainTokenizer
from ludic.inference.tiny import (
    TINY_VOCAB_SIZE,
    plain_tiny_tokenizer,
    tiny_model,
    tiny_tokenizer,
)

PLAIN = tiny_tokenizer()
WORDY = tiny_tokenizer(["hello", " world", "hell", "<move>"])
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(
    st.sampled_from(["hello", " world", "hell", "<move>", "é", "<|im_end|>", "\n", " ", "Ġ"])
).map("".join)


@given(text=TEXTS)
def test_any_text_comes_back_as_it_was(text: str) -> None:
    for tokenizer in (PLAIN, WORDY):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"])).filter(lambda t: "<|" not in t))
def test_without_words_there_is_one_id_for_each_byte(text: str) -> None:
    assert PLAIN.encode(text) == list(text.encode())


def test_words_are_whole_tokens_and_the_longest_goes_first() -> None:
    assert WORDY.encode("hello world!") == [258, 259, ord("!")]
    assert len(WORDY) == TINY_VOCAB_SIZE + 4


@given(text=TEXTS)
def test_without_transformers_it_is_the_same_tokenizer(text: str) -> None:
    ours, theirs = plain_tiny_tokenizer(), PlainTokenizer.of(PLAIN)
    rest = ("special_tokens_map", "eos_token_id", "chat_template", "name_or_path")
    assert [getattr(ours, name) for name in rest] == [getattr(theirs, name) for name in rest]
    assert ours.encode(text) == theirs.encode(text)


def test_the_end_of_a_turn_is_the_end_of_the_sequence_and_the_padding() -> None:
    assert len(PLAIN) == TINY_VOCAB_SIZE
    assert PLAIN.eos_token == PLAIN.pad_token == "<|im_end|>"
    assert PLAIN.decode([104, 105, PLAIN.eos_token_id], skip_special_tokens=True) == "hi"


@pytest.mark.parametrize("word", ["", "é", "a\tb"])
def test_a_word_that_could_not_be_decoded_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        tiny_tokenizer([word])


def test_a_word_may_not_be_listed_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        tiny_tokenizer(["a", "a"])


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return str(PLAIN.apply_chat_template(messages, tokenize=False, **options))


def test_the_template_is_chatml() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Why?"},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_conversation_that_goes_on_extends_its_own_rendering() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    kinds: list[dict[str, Any]] = [{}, {"tools": tools}]
    for options in kinds:
        for n in range(1, len(messages)):
            shorter = render(messages[:n], **options)
            assert render(messages[: n + 1], **options).startswith(shorter)
    text = render(messages, tools=tools)
    assert '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' in text
    assert '"name": "add"' in text.split("<|im_end|>")[0]


def test_the_model_is_the_same_for_the_same_seed_and_touches_no_global_state() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a, b, c = tiny_model(0), tiny_model(0), tiny_model(1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


def test_the_model_is_a_small_float32_qwen2_with_tied_embeddings() -> None:
    model = tiny_model(hidden_size=32, layers=1, vocab_size=300)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(input_ids=torch.tensor([[1, 2, 299]])).logits.shape == (1, 3, 300)


@pytest.mark.parametrize("hidden_size", [64, 128])
def test_what_the_model_says_depends_on_what_it_read(hidden_size: int) -> None:
    """In nats: how much the next token tells of a context that ends in the same token."""

    def told(**options: Any) -> float:
        model = tiny_model(hidden_size=hidden_size, **options)
        contexts = torch.randint(0, 250, (64, 24), generator=torch.Generator().manual_seed(0))
        contexts[:, -1] = 7
        with torch.no_grad():
            logprobs = model(input_ids=contexts).logits[:, -1].double().log_softmax(-1)
        mean = logprobs.exp().mean(0).log()
        return float((logprobs.exp() * (logprobs - mean)).sum(-1).mean())

    assert told() > 0.1
    assert told(initializer_range=0.02) < 0.02
