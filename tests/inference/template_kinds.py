"""Tokenizers with chat templates of several kinds, on the vocabulary of the real SmolLM2."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("smollm2", "qwen25_tools", "qwen3_thinking", "llama3")

_LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_QWEN_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@cache
def tokenizer_of(kind: str) -> Any:
    """A tokenizer with the template of that kind; shared, so do not change it."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    from tools import smollm2

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2.path())
    if kind == "smollm2":
        return tokenizer
    source = Path(__file__).parent / "templates" / f"{kind}.jinja"
    tokenizer.chat_template = source.read_text(encoding="utf-8")
    if kind == "llama3":
        special: list[Any] = [AddedToken(t, special=True, normalized=False) for t in _LLAMA3_TOKENS]
        tokenizer.add_tokens(special, special_tokens=True)
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    elif kind == "qwen3_thinking":
        # Single tokens, but not control tokens: as the real vocabulary has them.
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in _QWEN_TAGS])
    return tokenizer
