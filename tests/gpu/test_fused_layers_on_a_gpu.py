"""Fused training layers in bfloat16: no further from float64 than the family's own code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ludic.training import TrainerConfig
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.policy import Policy
from tests.training.synthetic import synthetic_batch
from tests.training.update.test_fused_layers import tiny, with_adapter
from tests.training.update.test_product_sums import Update, check_close, check_sums, narrow_model

pytestmark = pytest.mark.gpu


def gradients(model: nn.Module, *, fused: bool) -> dict[str, torch.Tensor]:
    policy = Policy(model, TrainerConfig(fused_layers=fused))
    layout = lay_out(synthetic_batch(5, rollouts=64, prompt=40), max_seq_len=4096)
    micro = pack(layout, range(len(layout.packed)), share=policy.shares).to(torch.device("cuda"))
    logprobs, entropies, _ = policy(micro, True)
    (logprobs.sum() + entropies.sum()).backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_gradients_are_as_near_to_float64_as_the_familys_own(family: str, adapter: bool) -> None:
    model = tiny(family).to("cuda", torch.bfloat16)
    if adapter:
        model = with_adapter(model.cpu()).to("cuda")
    oracle = gradients(copy.deepcopy(model).double(), fused=False)
    own = gradients(copy.deepcopy(model), fused=False)
    fused = gradients(model, fused=True)
    assert fused.keys() == own.keys()

    def error(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n] - oracle[n]).norm() / oracle[n].norm()) for n in found)

    assert error(fused) < 1.1 * error(own)
    assert error(fused) != error(own)  # it is another pass that was measured


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_products_add_weights_gradients_in_float32(adapter: bool, checkpointing: bool) -> None:
    model = narrow_model(adapter=adapter, device="cuda")
    rounded = Update(copy.deepcopy(model), by_products=False, gradient_checkpointing=checkpointing)
    ours = Update(model, gradient_checkpointing=checkpointing)
    assert ours.passes > 1
    assert ours.added
    assert not rounded.added
    check_sums(ours, rounded)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_what_products_added_in_a_pass_that_failed_counts_once(fails_at: int) -> None:
    model = narrow_model(device="cuda")
    whole = Update(copy.deepcopy(model))
    again = Update(model, fails_at=fails_at)
    assert whole.added
    check_close(again.gradients, whole.gradients)
