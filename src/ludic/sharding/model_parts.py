"""The parts of a causal language model that training has to tell apart."""

from __future__ import annotations

from typing import Any

from torch import nn

from ludic.errors import ConfigError
from ludic.inference.local.module.base_model import base_causal_lm as base_causal_lm


def head_of(causal: nn.Module) -> nn.Module:
    """The module that turns hidden states into logits."""
    find: Any = getattr(causal, "get_output_embeddings", None)
    head = None if find is None else find()
    if head is None:
        raise ConfigError(
            f"{type(causal).__name__} has no output embeddings: it is not a language model"
        )
    return head  # type: ignore[no-any-return]


def vocabulary_size(causal: nn.Module) -> int:
    """How many logits the head computes."""
    weight: Any = head_of(causal).weight
    return int(weight.shape[0])


def config_facts(causal: nn.Module) -> dict[str, Any]:
    """The configuration of a model, or of the language model in it, by name; empty without one.

    As a dict: some attributes of a configuration whose layers differ raise when they are read.
    """
    config: Any = getattr(causal, "config", None)
    return config.get_text_config().to_dict() if config is not None else {}


def backbone_of(causal: nn.Module) -> nn.Module:
    """The module that turns ids into hidden states."""
    prefix = getattr(causal, "base_model_prefix", "")
    backbone = getattr(causal, prefix, None) if prefix else None
    if backbone is None or backbone is causal:
        raise ConfigError(
            f"{type(causal).__name__} cannot be split into backbone and head: it has no member "
            f"named by base_model_prefix={prefix!r}"
        )
    return backbone  # type: ignore[no-any-return]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The backbone's blocks: its longest list of modules."""
    causal = base_causal_lm(model)
    lists = [m for m in backbone_of(causal).modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(causal).__name__} has no list of layers")
    return max(lists, key=len)
