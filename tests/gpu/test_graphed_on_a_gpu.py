"""Replayed passes on a GPU: the values and gradients of passes that are launched."""

from __future__ import annotations

import pytest
import torch

from ludic.inference.tiny import tiny_model
from ludic.plumbing.precision import Precision, weights_dtype
from ludic.training.config import TrainerConfig
from ludic.training.update.policy import Policy
from tests.training.update.test_graphed import packed

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("precision", ["bfloat16", "mixed"])
def test_replayed_passes_have_the_values_and_gradients_of_launched_ones(
    precision: Precision, share: bool
) -> None:
    model = tiny_model(hidden_size=256, layers=3).to(CUDA, weights_dtype(precision))
    launched = Policy(model, TrainerConfig(precision=precision))
    replayed = Policy(model, TrainerConfig(precision=precision), graphs=True)
    assert replayed.graphs is not None
    for round_ in range(4):  # each size runs, is captured and then replayed
        for prompts in ((60, 57, 60, 31), (200, 40)):
            micro = packed(prompts, share=share, members=16, seed=round_).to(CUDA)
            found = []
            for policy in (launched, replayed):
                policy.zero_grad()
                scored = policy.score(micro, entropy=True)
                assert scored.entropy is not None
                weights = torch.linspace(-1, 2, len(scored.logprobs), device=CUDA)
                loss = (scored.logprobs * weights).sum() + 0.3 * scored.entropy.sum()
                loss.backward()  # type: ignore[no-untyped-call]
                flat = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
                found.append((scored.logprobs.detach(), torch.cat(flat)))
                del scored, loss  # a graph of autograd from another stream breaks a capture
            (values, grads), (own_values, own_grads) = found
            assert (values - own_values).abs().max() < 0.05
            assert (values - own_values).abs().mean() < 0.005
            assert (grads - own_grads).norm() < 0.02 * grads.norm()
        with torch.no_grad():  # in place, as an optimizer does it
            for parameter in model.parameters():
                parameter.mul_(1 + 0.01 * round_)
    graphs = replayed.graphs
    assert sum(p.graphs is not None for p in graphs.passes.values()) == len(graphs.passes) > 1
