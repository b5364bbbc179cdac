"""The model that the tests use is the real one, and is asked for by a command when absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import smollm2


def test_the_tokenizer_has_its_own_chat_template_and_ends_turns_with_its_end_token(
    smollm2_tokenizer: Any,
) -> None:
    said = [{"role": "user", "content": "Hi"}]
    text = smollm2_tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")
    assert smollm2_tokenizer.eos_token == smollm2_tokenizer.pad_token == "<|im_end|>"
    assert smollm2_tokenizer.encode("<|im_end|>") == [smollm2_tokenizer.eos_token_id]


def test_an_absent_model_is_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"python -m tools\.smollm2"):
        smollm2.path()
