"""Prompts that are admitted together and take their beginning from one another, on the CPU."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
import torch

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


async def test_rows_read_a_beginning_where_somebody_has_the_same_one(tokenizer: Any) -> None:
    """Before every step, while rows join, end and move, also those that go on where they left off,
    or have to begin again because the weights changed."""
    model, random = family("Llama"), Random(3)
    system = BEGINNING[:12]
    options: Any = {"deterministic": False, "pipelined": True, "max_slots": 12}
    tokens_read_elsewhere = []

    async def member(client: LocalChatClient, question: list[int], seed: int) -> list[Any]:
        prompt, answers = [*system, *question], []
        for turn in range(3):
            ask = request(prompt, seed=seed + turn, max_tokens=2 + seed % 9, ignore_eos=True)
            answers.append(await client.complete_tokens(ask))
            assert answers[-1].trace is not None
            prompt = [*answers[-1].trace.token_ids, 3, seed % 60]
        return answers

    async with LocalChatClient(model, tokenizer, on_update="continue", **options) as client:
        batch: Any = client._scheduler.batch  # type: ignore[attr-defined]
        step = batch.step

        def checked(rows: int, length: int) -> None:
            kv, tenants = batch.arena.kv, batch.arena.tenants
            for row, (source, common) in enumerate(batch.state[5:].t().tolist()[: len(tenants)]):
                assert common <= tenants[row].computed
                assert torch.equal(kv[:, :, source, :, :common], kv[:, :, row, :, :common])
                tokens_read_elsewhere.append(common if source != row else 0)
            assert not batch.state[5:, len(tenants) :].any()
            step(rows, length)

        batch.step = checked
        for _ in range(2):
            questions = [[random.randrange(60) for _ in range(2 + 5 * i)] for i in range(5)]
            members = [(q, 100 * i + 7 * j) for i, q in enumerate(questions) for j in range(4)]
            tasks = [asyncio.create_task(member(client, q, seed)) for q, seed in members]
            await asyncio.wait(tasks[:5], return_when=asyncio.FIRST_COMPLETED)
            async with client.updating():
                pass  # the same weights, but nobody knows
            answers = [answer for task in tasks for answer in await task]
            for answer in answers:
                assert answer.trace is not None
                found = answer.trace.completion_logprobs
                assert found == pytest.approx(plain_logprobs(model, answer), abs=2e-5)
    shared = [tokens for tokens in tokens_read_elsewhere if tokens]
    assert len(shared) > len(tokens_read_elsewhere) / 3
    assert {len(system) + 2, len(system) + 7} & {tokens + 1 for tokens in shared}
