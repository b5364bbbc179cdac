"""The engine's logits are float32, also where the weights are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ludic.inference.local import LocalChatClient
from ludic.inference.local.view import module_view
from ludic.inference.tiny import tiny_model
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.policy import Policy
from tests.inference.local.asking import MODES, ask_all, request
from tests.training.synthetic import synthetic_batch


def test_a_heads_product_is_rounded_to_float32_only() -> None:
    model = tiny_model().bfloat16()
    head: Any = module_view(model).get_output_embeddings()
    hidden = torch.randn(1, 5, head.weight.shape[1]).bfloat16()
    found = head(hidden)
    wanted = hidden.double() @ head.weight.double().t()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    assert head.weight is model.get_output_embeddings().weight


def test_a_head_in_float32_is_left_alone() -> None:
    assert type(module_view(tiny_model()).get_output_embeddings()) is nn.Linear


@pytest.mark.parametrize("mode", MODES)
async def test_log_probs_lie_on_no_bfloat16_grid(tokenizer: Any, mode: Any) -> None:
    """Where logits are rounded, so are their differences: two tokens' log-probs in one context
    then differ by a multiple of the spacing."""
    model = tiny_model().bfloat16()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8.0)  # large logits, which rounding would hurt
    asks = [request([5, 6, 7], max_tokens=1, seed=seed, temperature=4.0) for seed in range(40)]
    async with LocalChatClient(model, tokenizer, **mode) as client:
        answers = await ask_all(client, asks)
    found = {
        a.trace.token_ids[-1]: a.trace.completion_logprobs[0]
        for a in answers
        if a.trace is not None and a.trace.completion_logprobs is not None
    }
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([[5, 6, 7]]))[0][0, -1]
        exact = hidden.float() @ model.lm_head.weight.float().t()
        rounded = exact.bfloat16().float()
    ids = torch.tensor(list(found))
    reported = torch.tensor([found[int(i)] for i in ids])
    wide, narrow = (
        (torch.log_softmax(logits / 4.0, -1)[ids] - reported).abs().mean().item()
        for logits in (exact, rounded)
    )
    assert len(found) > 5
    assert wide < narrow


def test_the_trainer_rounds_no_logits_of_a_bfloat16_model() -> None:
    model = tiny_model().bfloat16()
    micro = pack(lay_out(synthetic_batch(0)), range(4))
    with torch.no_grad():
        logits = Policy(model).score(micro, logits=True).logits
    assert logits is not None
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
