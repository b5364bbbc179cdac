"""Prompts that are admitted together and take their beginning from one another, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from ludic.inference.local import LocalChatClient
from tests.inference.local.asking import ask_all, plain_logprobs, request
from tests.inference.local.test_families import family

BEGINNING = [7 + (3 * i) % 50 for i in range(24)]


async def test_a_donor_that_waits_for_its_own_copy_gives_what_it_will_have(tokenizer: Any) -> None:
    # The first is computed alone. The others join in one go, next to each other in the order of
    # tokens, so that most of them find one that has just joined.
    asks = [request([*BEGINNING, 5], seed=0, max_tokens=6)]
    asks += [request([*BEGINNING, 60 + i, 9, i], seed=i, max_tokens=6) for i in range(1, 7)]
    model = family("Llama")
    options: Any = {"deterministic": False, "pipelined": True, "max_slots": 8}
    async with LocalChatClient(model, tokenizer, **options) as client:
        donors = []
        scheduler: Any = client._scheduler
        copy = scheduler._copy_beginning

        def noted(donor: Any, sequence: Any, tokens: int) -> None:
            donors.append(donor.slot in scheduler._copies)
            copy(donor, sequence, tokens)

        scheduler._copy_beginning = noted
        answers = await ask_all(client, asks)
    assert any(donors)
    for answer in answers:
        assert answer.trace is not None
        found = answer.trace.completion_logprobs
        assert found == pytest.approx(plain_logprobs(model, answer), abs=2e-5)
    assert sum(answer.info["reused_tokens"] for answer in answers) >= 6 * 24


async def test_a_prompt_that_another_one_is_costs_no_pass_over_prompts(tokenizer: Any) -> None:
    model = family("Llama")
    options: Any = {"deterministic": False, "pipelined": True, "max_slots": 8}
    asks = [request(BEGINNING, seed=i, max_tokens=4, ignore_eos=True) for i in range(8)]
    async with LocalChatClient(model, tokenizer, **options) as client:
        scheduler: Any = client._scheduler
        passes = []
        batches = scheduler.prefill.batches

        def noted(work: Any) -> Any:
            passes.append([item.count for item in work])
            return batches(work)

        scheduler.prefill.batches = noted
        answers = await ask_all(client, asks)
    assert passes == [[len(BEGINNING) - 1]]  # decoding computes the last token
    for answer in answers:
        assert answer.trace is not None
        found = answer.trace.completion_logprobs
        assert found == pytest.approx(plain_logprobs(model, answer), abs=2e-5)
