"""In mixed precision the engine samples from a bfloat16 copy that follows the module's weights."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ludic.inference.local import LocalChatClient
from ludic.inference.local.copies import Shadow
from ludic.inference.tiny import tiny_model
from tests.inference.local.asking import MODES, ask_all, plain_logprobs, request
from tests.inference.local.test_updates import shift


def is_rounded(client: LocalChatClient, model: torch.nn.Module) -> bool:
    """Whether the copy is the module's weights rounded, bit for bit."""
    assert client._shadow is not None
    copies = dict(client._shadow.model.named_parameters(remove_duplicate=False))
    live = dict(model.named_parameters(remove_duplicate=False))
    assert copies.keys() == live.keys()
    return all(
        copies[name].dtype == torch.bfloat16 and torch.equal(copies[name], live[name].bfloat16())
        for name in live
    )


@pytest.mark.parametrize("mode", MODES)
async def test_after_each_update_the_copy_is_the_rounded_weights(tokenizer: Any, mode: Any) -> None:
    model = tiny_model()
    async with LocalChatClient(model, tokenizer, precision="mixed", **mode) as client:
        assert is_rounded(client, model)
        for version in (1, 2):
            async with client.updating(version=version):
                shift(model)
                assert not is_rounded(client, model)
            assert is_rounded(client, model)
            asks = [request([i, 3, 4], max_tokens=8, seed=i) for i in range(4)]
            for answer in await ask_all(client, asks):
                assert answer.trace is not None
                assert answer.trace.version_spans[0].version == version
                rounded = copy.deepcopy(model).bfloat16()
                assert answer.trace.completion_logprobs == pytest.approx(
                    plain_logprobs(rounded, answer), abs=0.1
                )
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())


async def test_weights_changed_without_an_update_are_copied_when_they_are_published(
    tokenizer: Any,
) -> None:
    model = tiny_model()
    async with LocalChatClient(model, tokenizer, precision="mixed") as client:
        shift(model)  # as a resumed checkpoint does
        await client.sync_weights({}, version=1)
        assert is_rounded(client, model)
        before = client.stats()["updates"]
        await client.sync_weights({}, version=2)
        assert client.stats()["updates"] == before  # nothing to renew: nobody is held up


async def test_an_update_that_fails_half_way_leaves_the_copy_as_the_weights_are(
    tokenizer: Any,
) -> None:
    model = tiny_model()
    async with LocalChatClient(model, tokenizer, precision="mixed") as client:
        with suppress(ZeroDivisionError):
            async with client.updating():
                shift(model)
                raise ZeroDivisionError
        assert is_rounded(client, model)


async def test_foreign_tensors_go_through_the_module_into_the_copy(tokenizer: Any) -> None:
    model, other = tiny_model(), tiny_model(1)
    async with LocalChatClient(model, tokenizer, precision="mixed") as client:
        await client.sync_weights(dict(other.named_parameters()), version=1)
        assert is_rounded(client, other)
        assert is_rounded(client, model)


async def test_weights_replaced_by_other_tensors_are_copied_too(tokenizer: Any) -> None:
    model = tiny_model()
    async with LocalChatClient(model, tokenizer, precision="mixed") as client:
        async with client.updating():
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.5
        assert is_rounded(client, model)


async def test_an_adapter_is_part_of_the_copy(tokenizer: Any) -> None:
    base = tiny_model()
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    async with LocalChatClient(model, tokenizer, precision="mixed") as client:
        async with client.updating():
            shift(model)
        assert is_rounded(client, base)


def test_tied_weights_are_one_copy_and_keep_their_address() -> None:
    model = tiny_model()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    shadow = Shadow(model)
    copied: Any = shadow.model
    weight = copied.get_input_embeddings().weight
    assert copied.get_output_embeddings().weight is weight
    address = weight.data_ptr()
    shift(model)
    assert not shadow.is_current
    shadow.refresh()
    assert shadow.is_current
    assert copied.get_input_embeddings().weight.data_ptr() == address
    assert {p.data_ptr() for p in copied.parameters()}.isdisjoint(
        p.data_ptr() for p in model.parameters()
    )
