"""Steps in flight while sequences end and prompts join, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import ReturnSpec
from tests.inference.local import by_hand
from tests.inference.local.asking import ask_all, plain_logprobs, request
from tests.inference.local.test_families import family

OPTIONS: Any = {"deterministic": False, "pipelined": True}


def check(model: Any, answers: list[Any], lengths: list[int]) -> None:
    for answer, length in zip(answers, lengths, strict=True):
        found = answer.trace.completion_logprobs
        assert len(found) == length
        assert found == pytest.approx(plain_logprobs(model, answer), abs=2e-5)


async def test_prompts_join_without_waiting_for_the_steps_in_flight(tokenizer: Any) -> None:
    model, lengths = family("Llama"), [3 + 5 * (i % 4) for i in range(16)]
    asks = [
        request([9, i, *range(20)], seed=i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate(lengths)
    ]
    async with LocalChatClient(model, tokenizer, max_slots=4, **OPTIONS) as client:
        scheduler: Any = client._scheduler
        settle, join, in_flight = scheduler.settle, scheduler._join_prompts, []

        def no_settling() -> None:
            raise AssertionError("a join read the steps in flight")

        def joined() -> None:
            in_flight.append(len(scheduler._flights))
            scheduler.settle = no_settling
            join()
            scheduler.settle = settle

        scheduler._join_prompts = joined
        answers = await ask_all(client, asks)
    assert max(in_flight) > 0
    check(model, answers, lengths)


async def test_what_ended_runs_on_with_the_others_but_not_out_of_the_context(
    tokenizer: Any,
) -> None:
    # The first four end near the end of the context, and are too few to leave by themselves.
    model, context = family("Llama"), 48
    lengths = [2 + i for i in range(4)] + [40] * 20
    asks = [
        request([i, *range(context - n - 8)], seed=i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate(lengths)
    ]
    options = {**OPTIONS, "max_slots": 32, "max_context_tokens": context}
    async with LocalChatClient(model, tokenizer, **options) as client:
        scheduler: Any = client._scheduler
        launch, longest, stayed = scheduler._launch, [], []

        def launched() -> None:
            stayed.append(len(scheduler._ended))
            launch()
            longest.append(scheduler._longest() if scheduler.running else 0)

        scheduler._launch = launched
        answers = await ask_all(client, asks)
        assert client.stats()["slots_taken"] == 0
    assert max(stayed) > 0
    assert max(longest) == context
    check(model, answers, lengths)


@torch.inference_mode()
def test_one_that_ends_while_others_join_has_its_slot_until_it_leaves() -> None:
    # A prompt that is scored draws its first token at once. The one after it waits for a slot.
    scheduler = by_hand.pipelined(family("Llama"), max_slots=8)
    answers: list[Any] = []
    scheduler.waiting.extend(by_hand.sequence([i, 3, 4], 9, answers) for i in range(7))
    scored = ReturnSpec(prompt_logprobs=True)
    scheduler.waiting.append(by_hand.sequence([7, 3, 4], 1, answers, scored))
    scheduler.waiting.append(by_hand.sequence([8, 3, 4], 9, answers))
    while scheduler.has_work:
        scheduler.advance()
        assert scheduler.memory.taken <= 8
    assert [len(answer.trace.completion_token_ids) for answer in answers] == [1, *[9] * 8]


@torch.inference_mode()
def test_what_a_donor_has_beyond_the_common_beginning_is_not_copied() -> None:
    scheduler = by_hand.pipelined(family("Llama"), max_slots=8)
    answers: list[Any] = []
    short, long = list(range(10)), list(range(100, 130))
    scheduler.waiting.extend(by_hand.sequence(p, 20, answers) for p in (short, long))
    scheduler.advance()
    donor = next(s for s in scheduler.running if s.prompt_len == len(short))
    # As if it had drawn a token whose embedding is broken, and nobody had read that yet.
    scheduler.batch.arena.kv[:, :, donor.slot, :, len(short) :] = float("nan")
    scheduler.waiting.extend(by_hand.sequence([*p, 200], 20, answers) for p in (short, long))
    scheduler._join_prompts()
    reused = [s for s in scheduler.running if s.reused]
    assert [s.reused for s in reused] == [len(short), len(long)]
    for s in reused:
        assert scheduler.batch.arena.kv[:, :, s.slot].isfinite().all()
