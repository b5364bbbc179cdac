"""The model inside its wrappers, and adapters that cannot be left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.errors import ConfigError
from ludic.inference.local import LocalChatClient
from ludic.plumbing.model_parts import base_causal_lm


def test_the_model_inside_compile_and_peft_wrappers_is_found(model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    assert base_causal_lm(model) is model
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert base_causal_lm(adapted) is model
    assert base_causal_lm(torch.compile(adapted)) is model  # type: ignore[arg-type]


def test_an_adapter_that_learns_a_prompt_is_refused(model: Any, tokenizer: Any) -> None:
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adapted: Any = get_peft_model(model, config)
    with pytest.raises(ConfigError, match=r"'default' is of a prompt-learning kind.*LoRA"):
        LocalChatClient(adapted, tokenizer)
