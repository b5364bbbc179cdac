"""The parts of a model, told apart without running it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ludic.plumbing.model_parts import Dropouts, active_dropout, may_drop


def test_the_first_module_that_drops_units_is_named_unless_it_does_not_count() -> None:
    model = nn.ModuleDict(
        {"none": nn.Dropout(0.0), "lora_dropout": nn.Dropout(0.5), "last": nn.Dropout(0.1)}
    )
    assert active_dropout(model) == "lora_dropout (p=0.5)"
    assert active_dropout(model, but="lora_dropout") == "last (p=0.1)"
    model["last"].eval()
    assert active_dropout(model, but="lora_dropout") is None


def test_a_probability_that_a_module_hands_on_counts_like_a_dropout_layer() -> None:
    attention: Any = nn.Identity()
    model = nn.ModuleDict({"attention": attention})
    for probability, name in ((0.0, None), (0.2, "attention.attention_dropout (0.2)")):
        attention.attention_dropout = probability
        assert active_dropout(model) == name


def test_dropout_that_is_changed_after_the_modules_were_listed_is_noticed() -> None:
    attention: Any = nn.Identity()
    attention.attention_dropout = 0.0
    layer = nn.Dropout(0.0)
    model = nn.ModuleDict({"attention": attention, "lora_dropout": layer, "plain": nn.Identity()})
    dropouts = Dropouts(model)
    assert dropouts.active() is None
    assert not may_drop(model)
    layer.p = 0.3
    assert dropouts.active() == "lora_dropout (p=0.3)"
    assert dropouts.active(but="lora_dropout") is None
    attention.attention_dropout = 0.1
    assert dropouts.active(but="lora_dropout") == "attention.attention_dropout (0.1)"
    model.eval()
    assert dropouts.active() is None
    assert may_drop(model)
