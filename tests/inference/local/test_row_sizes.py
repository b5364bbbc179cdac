"""Which numbers of rows may be mixed: a trial that must see what training will bring to light."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ludic.inference.local import LocalChatClient, row_sizes
from ludic.inference.local.eager import EagerScheduler
from ludic.inference.local.row_sizes import with_random_values
from ludic.inference.local.view import module_view
from ludic.inference.tiny import tiny_model


class TwoKernels(nn.Linear):
    """Rounds the bias in another place when there are many rows, as some libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.weight)
        if x.shape[-2] <= 16:
            return product + self.bias
        return (product + 3 * self.bias) - 2 * self.bias


@pytest.mark.parametrize("small", [1 << 17, 0])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
async def test_sizes_that_round_a_bias_differently_are_told_apart_while_it_is_still_zero(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str, small: int
) -> None:
    monkeypatch.setattr(row_sizes, "_SMALL", small)
    model = tiny_model(layers=1)
    layer = model.model.layers[0].self_attn.get_submodule(name)
    assert not layer.bias.any()
    layer.__class__ = TwoKernels
    async with LocalChatClient(model, tokenizer) as client:
        assert isinstance(client._scheduler, EagerScheduler)
        sizes = client._scheduler.row_sizes
    assert sizes is not None
    assert 16 not in sizes
    assert max(sizes) == 1024


def test_the_trial_leaves_the_model_as_it_is() -> None:
    model = tiny_model()
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    trial: Any = with_random_values(module_view(model))
    for name, p in model.named_parameters():
        same, values = before[name]
        assert p is same
        assert torch.equal(p, values)
    for name, p in trial.named_parameters():
        assert p.amin() < p.amax(), f"{name} hides what a kernel does with it"
    assert trial.get_output_embeddings().weight is trial.get_input_embeddings().weight
