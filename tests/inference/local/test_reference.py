"""A module's forward pass in a wider type, one layer at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ludic.inference.local import LocalChatClient
from ludic.inference.local.copies import reference_logits, widened_by_layer
from tests.inference.local.test_families import family
from tests.inference.local.test_family_check import EXPERTS, tiny

IDS = torch.tensor([[84, 104, 101, 32, 119, 101, 97, 116]])


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "GPT2", *EXPERTS])
@torch.no_grad()
def test_it_is_what_a_whole_copy_in_that_type_computes(name: str) -> None:
    model = tiny(name, **EXPERTS[name]) if name in EXPERTS else family(name)
    model.bfloat16()
    wide = widened_by_layer(model, torch.float32)
    found = wide(input_ids=IDS, use_cache=False).logits[0]
    assert all(p.dtype == torch.bfloat16 for m in (model, wide) for p in m.parameters())
    wanted = model.float()(input_ids=IDS, use_cache=False).logits[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@torch.no_grad()
def test_no_more_than_one_layer_is_wide_at_a_time_and_the_module_is_not_touched() -> None:
    model = family("Llama", num_hidden_layers=3).bfloat16()
    before = [(id(p), p.dtype) for p in model.parameters()]
    wide: Any = widened_by_layer(model, torch.float32)
    seen = []

    def look(*_: Any) -> None:
        types = [{p.dtype for p in layer.parameters()} for layer in wide.model.layers]
        assert all(len(found) == 1 for found in types)
        seen.append([torch.float32 in found for found in types])
        assert [(id(p), p.dtype) for p in model.parameters()] == before

    for layer in wide.model.layers:
        layer.register_forward_pre_hook(look)
    wide(input_ids=IDS, use_cache=False)
    assert seen == [[True, False, False], [False, True, False], [False, False, True]]
    assert [(id(p), p.dtype) for p in model.parameters()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class ReadsTheEmbedding(nn.Module):
    """A head that takes another module's weight without calling that module."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.of = [embedding]  # in a list, so that it is not counted twice
        self.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.of[0].weight.t()


async def test_a_family_that_reads_weights_from_outside_is_run_as_a_whole_copy(
    tokenizer: Any,
) -> None:
    model = family("Llama").bfloat16()
    model.lm_head = ReadsTheEmbedding(model.model.embed_tokens)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            widened_by_layer(model, torch.float32)(input_ids=IDS, use_cache=False)
        found = reference_logits(model, IDS, torch.float32)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    async with LocalChatClient(model, tokenizer, deterministic=False):
        pass  # it is served
    with torch.no_grad():
        wanted = model.float()(input_ids=IDS, use_cache=False).logits[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
