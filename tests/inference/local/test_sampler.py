"""The sampled distribution, its log-probs, and what truncation keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.inference.local import LocalChatClient
from ludic.inference.local.sampler import (
    SamplingRows,
    _block,
    draw,
    invert,
    penalise,
    sample,
    truncate,
)
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.seeding import keyed_uniform, noise_key
from tests.inference.local.asking import ask_all, request


def splitmix(key: int, position: int) -> float:
    """The same hash, in Python's integers."""
    mask = (1 << 64) - 1
    x = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


@given(seed=st.integers(), position=st.integers(0, 1 << 40))
def test_the_noise_is_a_hash_of_seed_and_position(seed: int, position: int) -> None:
    key = noise_key(seed)
    found = keyed_uniform(torch.tensor([key]), torch.tensor([position])).item()
    assert found == splitmix(key, position)
    assert 0 <= found < 1


def test_the_noise_is_uniform_and_its_places_are_not_related() -> None:
    keys = torch.tensor([noise_key(i) for i in range(200)])[:, None].expand(200, 100)
    u = keyed_uniform(keys, torch.arange(100).expand(200, 100))
    assert abs(u.mean().item() - 0.5) < 0.01
    assert abs(u.var().item() - 1 / 12) < 0.005
    assert abs(torch.corrcoef(u)[0, 1:].mean().item()) < 0.05
    assert abs(torch.corrcoef(u.T)[0, 1:].mean().item()) < 0.05


@given(
    data=st.data(),
    vocab=st.sampled_from([3, 258, 4096, 5000, 49152, 50257]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_inverting_finds_the_token_at_which_the_running_sum_passes(
    data: Any, vocab: int, u: float
) -> None:
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    probs = torch.softmax(3 * torch.randn(vocab, generator=g), -1)
    probs[torch.rand(vocab, generator=g) < 0.3] = 0
    if probs.sum() == 0:
        probs[0] = 1
    token = int(invert(probs[None], torch.tensor([u], dtype=torch.float64))[0])
    assert probs[token] > 0
    exact = probs.double().cumsum(0) / probs.double().sum()
    slack = 1e-5
    assert (exact[token - 1].item() if token else 0.0) <= u + slack
    assert exact[token].item() >= u - slack


@pytest.mark.parametrize("vocab", [258, 49152, 50257, 151936, 151665])
def test_blocks_divide_the_vocabulary(vocab: int) -> None:
    assert vocab % _block(vocab) == 0


def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])
    n = 20_000
    u = keyed_uniform(torch.full((n,), noise_key(1)), torch.arange(n))
    tokens, logprobs = draw(logits.expand(n, -1).contiguous(), u)
    seen = torch.bincount(tokens, minlength=5) / n
    assert torch.allclose(seen, torch.softmax(logits[0], -1), atol=0.015)
    wanted = torch.log_softmax(logits[0], -1)[tokens]
    assert torch.allclose(logprobs, wanted, atol=1e-6)


@given(
    values=st.lists(st.floats(-5, 5), min_size=2, max_size=40),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 10),
    min_p=st.floats(0, 1),
)
def test_truncation_keeps_what_its_definition_says(
    values: list[float], top_p: float, top_k: int, min_p: float
) -> None:
    config = SamplingConfig(top_p=top_p, top_k=top_k, min_p=min_p)
    logits = torch.tensor(values, dtype=torch.float32)
    kept = set(torch.nonzero(truncate(logits, config) > -math.inf)[:, 0].tolist())
    order = sorted(range(len(values)), key=lambda i: (-logits[i].item(), i))
    wanted = order[:top_k] if top_k else list(order)
    if top_p < 1:
        weights = torch.softmax(logits[wanted].double(), -1).tolist()
        total, n = 0.0, 0
        while n < len(wanted) and total < top_p - 1e-12:
            total += weights[n]
            n += 1
        wanted = wanted[: max(n, 1)]
    if min_p:
        wanted = [
            i for i in wanted if math.exp(logits[i] - logits[order[0]]) >= min_p - 1e-6
        ] or wanted[:1]
    assert kept <= set(wanted) | {order[0]}
    # Rounding may decide on either side of the edge, by one token at most.
    assert len(wanted) - len(kept) <= 1


def test_penalties_follow_their_formulas() -> None:
    config = SamplingConfig(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    logits = torch.tensor([4.0, -4.0, 1.0, 1.0])
    out = penalise(logits, config, prompt=[1], completion=[0, 0, 2])
    assert out.tolist() == [4 / 2 - 0.5 - 2 * 0.25, -8.0, 0.5 - 0.5 - 0.25, 1.0]


def test_a_row_that_is_not_finite_says_so_and_leaves_the_others_alone() -> None:
    logits = torch.randn(3, 258)
    rows = SamplingRows(torch.ones(3), torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.long))
    clean = sample(logits, rows)
    logits[1, 5] = math.nan
    found = sample(logits, rows)
    assert math.isnan(found.logprobs[1])
    assert found.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


async def test_temperature_zero_takes_the_likeliest_token_with_certainty(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        answer = await client.complete_tokens(request([1, 2, 3], temperature=0.0, max_tokens=20))
    assert answer.trace is not None
    ids = answer.trace.token_ids
    with torch.no_grad():
        best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1)
    assert best[2:-1].tolist() == list(answer.trace.completion_token_ids)
    assert set(answer.trace.completion_logprobs or ()) == {0.0}


@pytest.mark.parametrize("mode", [{}, {"deterministic": False, "pipelined": True}])
async def test_kept_ids_are_recorded_and_the_logprob_is_renormalised_over_them(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    returns = ReturnSpec(kept_ids=True)
    asks = [
        request([1, 2], seed=1, max_tokens=10, top_k=4, returns=returns),
        request([1, 3], seed=2, max_tokens=10, top_p=0.3, temperature=0.5, returns=returns),
        request([1, 4], seed=3, max_tokens=10, returns=returns),
    ]
    async with LocalChatClient(model, tokenizer, **mode) as client:
        cut, nucleus, whole = await ask_all(client, asks)
    assert whole.trace is not None
    assert whole.trace.kept_token_ids == ((),) * len(whole.trace.completion_token_ids)
    for answer, temperature in ((cut, 1.0), (nucleus, 0.5)):
        trace = answer.trace
        assert trace is not None
        assert trace.kept_token_ids is not None
        assert trace.completion_logprobs is not None
        n = len(trace.prompt_token_ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([trace.token_ids])).logits[0] / temperature
        for i, (token, logprob, kept) in enumerate(
            zip(
                trace.completion_token_ids,
                trace.completion_logprobs,
                trace.kept_token_ids,
                strict=True,
            )
        ):
            assert token in kept
            row = logits[n - 1 + i]
            wanted = row[token] - torch.logsumexp(row[list(kept)], -1)
            assert logprob == pytest.approx(wanted.item(), abs=1e-5)
    assert cut.trace is not None
    assert all(len(kept) == 4 for kept in cut.trace.kept_token_ids or ())
