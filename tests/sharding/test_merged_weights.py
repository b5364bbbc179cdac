"""Merged weights compute what the adapter computes; what they could not say is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from ludic.errors import PublishError
from ludic.inference.tiny import tiny_model
from ludic.sharding.weights import ModelWeights


def untied() -> Any:
    config = copy.deepcopy(tiny_model().config)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def adapted(base: nn.Module, **settings: Any) -> Any:
    """A PEFT model whose trained parts have all moved."""
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, **settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
        {"target_modules": ["q_proj"], "lora_bias": True},  # its layers have biases of their own
        {"target_modules": ["q_proj"], "bias": "all"},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_merged_weights_compute_what_the_adapter_does(settings: dict[str, Any]) -> None:
    ids = torch.arange(20)[None]
    before = untied().eval()(ids).logits
    model = adapted(untied(), **settings)
    plain = untied().eval()
    plain.load_state_dict(dict(ModelWeights(model)))
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert (plain(ids).logits - before).abs().max() > 0.1  # otherwise this would say nothing


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "q_proj.lora_magnitude_vector"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "embed_tokens.token"),
        ({"target_modules": ["o_proj"], "lora_bias": True}, "o_proj.lora_B.default.bias"),
        (
            {"target_modules": [], "target_parameters": ["layers.0.mlp.up_proj.weight"]},
            "up_proj.lora_A",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lora_bias")
def test_what_cannot_be_merged_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(PublishError, match="cannot be merged") as refusal:
        dict(ModelWeights(adapted(untied(), **settings)))
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_weights_that_are_tied_but_trained_apart_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PublishError, match=r"lm_head\.weight is tied to another weight"):
        dict(ModelWeights(adapted(tiny_model(), **settings)))
