"""The same bits at any concurrency, and the same numbers as a plain forward pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import ReturnSpec
from ludic.inference.tiny import tiny_model
from tests.inference.local.asking import MODES, ask_all, plain_logprobs, request


def mixed_requests(n: int, seed: int = 0) -> list[TokenCompletionRequest]:
    """Prompts of many lengths, some with a common beginning, and every kind of sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(258) for _ in range(90)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.1, "temperature": 1.5},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"repetition_penalty": 1.3},
        {"temperature": 0.0},
    ]
    out = []
    for i in range(n):
        own = [rng.randrange(258) for _ in range(rng.choice([1, 2, 9, 30, 63, 64, 65]))]
        prompt = shared[: rng.randrange(90)] + own if i % 2 else own
        returns = ReturnSpec(prompt_logprobs=i % 7 == 0, kept_ids=i % 3 == 0)
        out.append(
            request(
                prompt, seed=i, max_tokens=rng.randrange(1, 12), returns=returns, **kinds[i % 8]
            )
        )
    return out


async def test_one_and_sixty_four_requests_in_flight_give_the_same_bits(
    model: Any, tokenizer: Any
) -> None:
    requests = mixed_requests(64)
    async with LocalChatClient(model, tokenizer) as client:
        crowd = await ask_all(client, requests, at_once=64)
    async with LocalChatClient(model, tokenizer) as client:
        alone = await ask_all(client, requests, at_once=1)
    async with LocalChatClient(model, tokenizer, prefix_cache_tokens=0) as client:
        uncached = await ask_all(client, requests[::-1], at_once=5)
    for a, b, c in zip(crowd, alone, uncached[::-1], strict=True):
        assert a.trace == b.trace == c.trace
        assert a.finish_reason == b.finish_reason
        assert a.info.get("prompt_logprobs") == b.info.get("prompt_logprobs")


async def test_biases_that_leave_zero_after_the_engine_was_made_keep_the_bits_equal(
    tokenizer: Any,
) -> None:
    """Layers so small that a library may take another kernel for few rows than for many."""
    model = tiny_model(hidden_size=16, layers=1, heads=2, kv_heads=1)
    noise = torch.Generator().manual_seed(0)
    requests = [request(range(i, i + 7), seed=i, max_tokens=6) for i in range(24)]
    async with LocalChatClient(model, tokenizer, prefix_cache_tokens=0) as client:
        async with client.updating(version=1):
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.data.copy_(torch.randn(parameter.shape, generator=noise))
        alone = await ask_all(client, requests, at_once=1)
        crowd = await ask_all(client, requests, at_once=24)
    assert [a.trace for a in alone] == [c.trace for c in crowd]


async def test_repeating_a_conversation_gives_the_same_bits_with_and_without_its_cache(
    model: Any, tokenizer: Any
) -> None:
    """A turn that was decoded and one that is computed again as a prompt are the same bits."""

    async def talk(client: LocalChatClient) -> list[Any]:
        ids: tuple[int, ...] = tuple(range(20, 60))
        traces = []
        for turn in range(4):
            answer = await client.complete_tokens(request(ids, seed=turn, max_tokens=30))
            assert answer.trace is not None
            traces.append(answer.trace)
            ids = (*answer.trace.token_ids, 10, 20, 30)
        return traces

    async with LocalChatClient(model, tokenizer) as client:
        cached = await talk(client)
        assert client.stats()["reused_tokens"] > 100
    async with LocalChatClient(model, tokenizer, prefix_cache_tokens=0) as client:
        assert await talk(client) == cached
        assert client.stats()["reused_tokens"] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_equal_a_plain_forward_pass(
    model: Any, tokenizer: Any, mode: Any, temperature: float
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(258) for _ in range(rng.randrange(1, 200))] for _ in range(24)]
    requests = [
        request(p, seed=i, max_tokens=80, temperature=temperature) for i, p in enumerate(prompts)
    ]
    async with LocalChatClient(model, tokenizer, **mode) as client:
        answers = await ask_all(client, requests)
    for answer in answers:
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer, temperature), abs=1e-5
        )


@pytest.mark.parametrize("mode", MODES)
async def test_prompt_logprobs_equal_a_plain_forward_pass(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(258) for _ in range(150)]
    asked = request(prompt, max_tokens=1, seed=0, returns=ReturnSpec(prompt_logprobs=True))
    async with LocalChatClient(model, tokenizer, **mode) as client:
        answers = await ask_all(client, [asked, asked])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
    logp = torch.log_softmax(logits, -1)
    for answer in answers:
        scores = answer.info["prompt_logprobs"]
        assert scores[0] is None
        assert scores[1:] == pytest.approx(
            [float(logp[i - 1, prompt[i]]) for i in range(1, len(prompt))], abs=1e-5
        )


async def test_a_scored_prompt_and_the_sampling_of_it_agree(model: Any, tokenizer: Any) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        first = await client.complete_tokens(request(range(40), seed=5, max_tokens=50))
        assert first.trace is not None
        again = request(
            first.trace.token_ids, seed=1, max_tokens=1, returns=ReturnSpec(prompt_logprobs=True)
        )
        scores = (await client.complete_tokens(again)).info["prompt_logprobs"]
    assert scores[40:] == pytest.approx(first.trace.completion_logprobs, abs=1e-6)
