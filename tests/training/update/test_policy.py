"""A model as a policy: what its family does to logits, and what is left alone for a sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWItem
from ludic.training.update import policy as policy_module
from ludic.training.update.layout import lay_out
from ludic.training.update.logprobs import LogitRule
from ludic.training.update.packing import pack
from ludic.training.update.policy import (
    Policy,
    attention_cost,
    check_packing,
    check_split,
    logit_rule,
)
from tests.training.synthetic import synthetic_batch
from tools.families import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        ("llama", {}, LogitRule(1.0, None)),
        ("cohere", {"logit_scale": 0.25}, LogitRule(0.25, None)),
        ("granite", {"logits_scaling": 4.0}, LogitRule(0.25, None)),
        ("gemma2", {"final_logit_softcapping": 2.0}, LogitRule(1.0, 2.0)),
    ],
)
def test_what_a_family_does_to_its_logits_is_done_to_the_policys(
    name: str, changes: dict[str, Any], rule: LogitRule
) -> None:
    model: Any = tiny(name).double()
    for key, value in changes.items():
        setattr(model.config, key, value)
        if hasattr(model, key):
            setattr(model, key, value)
    assert logit_rule(model) == rule
    ids = np.arange(3, 13)
    with torch.no_grad():
        own = model(torch.from_numpy(ids)[None]).logits[0]
        mask = np.array([0] + [1] * 9, np.int8)
        item = SAWItem(ids, np.ones(10, np.int8), mask, 1.0)
        micro = pack(lay_out(make_batch([item])), [0])
        policy = Policy(model)
        check_packing(policy, CPU)
        found = policy.score(micro, logits=True)
    assert found.logits is not None
    torch.testing.assert_close(found.logits, own[:-1].to(found.logits.dtype), rtol=1e-5, atol=1e-6)
    wanted = own[:-1].log_softmax(1).gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, wanted, rtol=1e-5, atol=1e-6)


def test_a_model_that_does_more_to_its_logits_is_refused() -> None:
    model = tiny_model()
    check_split(model, CPU)
    own = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits.roll(1, -1)
        return output

    model.forward = shifted
    with pytest.raises(ConfigError, match=r"differs from the model's own logits"):
        check_split(model, CPU)


def test_attention_costs_what_its_layers_and_width_say() -> None:
    model = tiny_model()
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    parameters = sum(p.numel() for p in model.parameters())
    assert attention_cost(model).quadratic == pytest.approx(layers * width / parameters)
    assert attention_cost(torch.nn.Linear(2, 2)).quadratic == 0  # it does not say


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_activations_are_recomputed_only_where_a_backward_pass_follows_and_never_for_a_sampler(
    monkeypatch: pytest.MonkeyPatch, checkpointing: bool, grad: bool
) -> None:
    used = []
    real: Any = getattr(policy_module, "checkpoint")  # noqa: B009

    def counting(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs["use_reentrant"])
        return real(*args, **kwargs)

    monkeypatch.setattr(policy_module, "checkpoint", counting)
    model = tiny_model()
    policy = Policy(model, gradient_checkpointing=checkpointing)
    Policy(model, gradient_checkpointing=checkpointing)  # wrapped once, however often
    micro = pack(lay_out(synthetic_batch(0, 2)), range(2))
    with torch.set_grad_enabled(grad):
        model(micro.input_ids[None])
        assert used == []
        policy.score(micro)
    layers = model.config.num_hidden_layers
    assert used == ([False] * layers if checkpointing and grad else [])


def test_entropies_and_logits_come_where_they_are_asked_for() -> None:
    policy = Policy(tiny_model())
    micro = pack(lay_out(synthetic_batch(0, 2)), range(2))
    plain = policy.score(micro)
    assert (plain.entropy, plain.logits) == (None, None)
    both = policy.score(micro, entropy=True, logits=True)
    assert both.entropy is not None
    assert both.logits is not None
    torch.testing.assert_close(both.entropy, torch.special.entr(both.logits.softmax(1)).sum(1))


@pytest.mark.parametrize(
    ("facts", "threshold"),
    [
        ({}, None),
        ({"rope_parameters": {"rope_type": "default"}, "max_position_embeddings": 5}, None),
        ({"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 5}, 5),
        (
            {
                "rope_parameters": {
                    "full": {"rope_type": "longrope", "original_max_position_embeddings": 7},
                    "sliding": {"rope_type": "dynamic"},
                    "other": None,
                },
                "max_position_embeddings": 9,
            },
            7,
        ),
    ],
)
def test_the_shortest_length_that_changes_a_rotary_embedding_counts(
    facts: dict[str, Any], threshold: int | None
) -> None:
    found = policy_module._rope_threshold(facts)
    assert found == threshold if threshold is not None else found > 10**9


def test_rows_that_are_computed_one_at_a_time_are_those_of_the_model_itself() -> None:
    batch = synthetic_batch(1, 3)
    model = tiny_model().double()
    layout = lay_out(batch)
    packed = Policy(model).score(pack(layout, range(3))).logprobs
    policy = Policy(model)
    policy.one_at_a_time("a test")
    torch.testing.assert_close(policy.score(pack(layout, range(3))).logprobs, packed)
