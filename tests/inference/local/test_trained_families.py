"""Families with weights like trained ones: served as a plain forward pass says, or refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ludic.errors import ConfigError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local import LocalChatClient, attention
from ludic.inference.local.attention import Masks, grouped_attention
from ludic.inference.tiny import tiny_model
from ludic.plumbing.llama_layers import attention_window
from tests.inference.local.asking import MODES, ask_all, plain_logprobs, request
from tests.inference.local.trained import FAMILIES, SMALL, WINDOW, built, small

SERVED = [name for name, family in FAMILIES.items() if not family.refused]
REFUSED = [name for name, family in FAMILIES.items() if family.refused]


def asks(count: int = 4) -> list[TokenCompletionRequest]:
    """Prompts shorter and longer than the window, with completions that leave it behind."""
    rng = random.Random(0)
    lengths = [3, WINDOW - 2, 45, 70][:count]
    return [
        request([rng.randrange(256) for _ in range(n)], seed=n, max_tokens=12, ignore_eos=True)
        for n in lengths
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SERVED)
async def test_a_family_gives_the_logprobs_of_its_own_forward_pass(
    tokenizer: Any, name: str, mode: Any
) -> None:
    model = small(name)
    async with LocalChatClient(model, tokenizer, max_slots=16, **mode) as client:
        together = await ask_all(client, asks())
        if mode["deterministic"]:
            for ask, answer in zip(asks(), together, strict=True):
                assert (await client.complete_tokens(ask)).trace == answer.trace
    for answer in together:
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer), abs=2e-5
        )


@pytest.mark.parametrize("name", SERVED)
async def test_a_family_is_served_in_bfloat16(tokenizer: Any, name: str) -> None:
    model = small(name).bfloat16()
    ask = request(range(65, 65 + WINDOW + 4), seed=0, max_tokens=2, ignore_eos=True)
    options: Any = {"deterministic": False, "max_context_tokens": 32, "max_slots": 2}
    async with LocalChatClient(model, tokenizer, **options) as client:
        answer = await client.complete_tokens(ask)
    assert answer.trace is not None
    rounding = [
        abs(a - b)
        for a, b in zip(
            plain_logprobs(model, answer), plain_logprobs(model.float(), answer), strict=True
        )
    ]
    assert answer.trace.completion_logprobs == pytest.approx(
        plain_logprobs(model, answer), abs=2 * max(rounding) + 0.02
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_the_engine_does_not_know_is_refused(
    tokenizer: Any, name: str, mode: Any
) -> None:
    with pytest.raises(ConfigError, match=FAMILIES[name].refused):
        LocalChatClient(small(name), tokenizer, **mode)


@pytest.mark.parametrize("name", SERVED)
def test_the_weights_are_such_that_a_family_shows_what_sets_it_apart(name: str) -> None:
    """What is compared above would be blind where a window, a cap or a factor moves no logit."""
    model, changes = small(name), FAMILIES[name].small
    ids = torch.tensor([asks()[-1].prompt_token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
        assert 0.5 < logits.std() < 50
        for setting in ("sliding_window", "final_logit_softcapping"):
            if changes.get(setting):
                other = small_with(name, {setting: 10 * changes[setting]})
                assert (other(input_ids=ids).logits[0] - logits).abs().max() > 0.05, setting


def small_with(name: str, changes: dict[str, Any]) -> Any:
    return built(FAMILIES[name], SMALL | FAMILIES[name].small | changes)


def test_a_rope_that_moves_is_refused_for_a_type_of_layers_too(tokenizer: Any) -> None:
    model = small("gemma3")
    model.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    with pytest.raises(ConfigError, match="rope type 'dynamic'"):
        LocalChatClient(model, tokenizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [WINDOW, 100])
def test_a_window_that_only_the_mask_knows_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, mode: Any, window: int
) -> None:
    """The layers name no window, the mask has one, and the check's text is shorter than it."""
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.llama import modeling_llama

    model = small("llama")
    model.config.sliding_window = window
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_sliding_window_causal_mask)
    with pytest.raises(ConfigError, match=r"layer 0 names the window None.*vLLM"):
        LocalChatClient(model, tokenizer, **mode)


async def test_a_window_beyond_the_context_hides_nothing(tokenizer: Any) -> None:
    model = built(FAMILIES["mistral"], SMALL | {"sliding_window": 4096})
    async with LocalChatClient(model, tokenizer):
        pass


def test_a_layer_that_biases_its_attention_is_refused(tokenizer: Any) -> None:
    model = tiny_model()
    layer = model.model.layers[0].self_attn
    kind = type(layer)

    class Biased(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, **options: Any) -> Any:
            options["attention_mask"] = torch.zeros(1, 4, 1, hidden_states.shape[1])
            return super().forward(hidden_states, **options)

    layer.__class__ = Biased
    with pytest.raises(ConfigError, match="adds a mask or a bias that it makes itself"):
        LocalChatClient(model, tokenizer)


def test_a_fused_layer_has_the_window_that_its_familys_code_has() -> None:
    llama, mistral, qwen = small("llama"), small("mistral"), small("qwen2 with windows")
    llama.config.sliding_window = 7  # a number that Llama's code never reads
    assert [attention_window(layer.self_attn) for layer in llama.model.layers] == [None, None]
    assert [attention_window(layer.self_attn) for layer in mistral.model.layers] == [WINDOW, WINDOW]
    assert [attention_window(layer.self_attn) for layer in qwen.model.layers] == [None, WINDOW]


@pytest.mark.parametrize("window", [None, 5])
def test_queries_whose_mask_would_be_too_large_attend_in_parts(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    noise = torch.Generator().manual_seed(0)
    q = torch.randn(2 * 13, 4, 8, generator=noise)
    keys, values = torch.randn(2, 2, 2, 32, 8, generator=noise)
    masks = Masks(torch.stack([torch.arange(13), torch.arange(19, 32)]), 32)
    whole = grouped_attention(q, keys, values, masks, 0.3, window)
    most = 3 * 2 * 32 * 2
    monkeypatch.setattr(attention, "MAX_MASK", most)
    made: list[torch.Tensor] = []
    get = Masks.get

    def counted(self: Masks, *args: Any) -> Any:
        made.append(mask := get(self, *args))
        return mask

    monkeypatch.setattr(Masks, "get", counted)
    parts = grouped_attention(q, keys, values, masks, 0.3, window)
    assert len(made) == 5
    assert max(mask.numel() for mask in made) <= most
    torch.testing.assert_close(parts, whole)
