"""Conversations: a turn computes its new tokens alone, in every way the engine can run."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from ludic.inference.local import LocalChatClient
from ludic.inference.local.gpu.pipelined import PipelinedScheduler
from tests.inference.local.asking import MODES, plain_logprobs, request

NEW = (10, 20, 30)
"""What the other side says between two turns."""


async def converse(client: LocalChatClient, number: int, lengths: tuple[int, ...]) -> list[Any]:
    ids: tuple[int, ...] = tuple(range(number, number + 20))
    answers: list[Any] = []
    for turn, length in enumerate(lengths):
        asked = request(ids, seed=10 * number + turn, max_tokens=length, ignore_eos=True)
        answers.append(await client.complete_tokens(asked))
        ids = (*answers[-1].trace.token_ids, *NEW)
    return answers


def tokens_held(scheduler: Any) -> int:
    """The tokens that the memory behind the scheduler's prefix store is taken up by."""
    if isinstance(scheduler, PipelinedScheduler):
        return scheduler.kept.room - scheduler.kept._free_count
    entries = scheduler.store._entries.values()
    held = sum(entry.kept.untyped_storage().nbytes() for entry in entries)
    return int(held / scheduler.memory.shape.bytes_per_token)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", ["together", "apart"])
async def test_a_turn_takes_over_what_was_computed_for_the_one_before(
    model: Any, tokenizer: Any, mode: Any, ending: str
) -> None:
    lengths = [(12, 9, 7) if ending == "together" else (9 + i, 7, 5 + 2 * i) for i in range(6)]
    async with LocalChatClient(model, tokenizer, max_slots=8, **mode) as client:
        talks = await asyncio.gather(*(converse(client, i, n) for i, n in enumerate(lengths)))
        held = tokens_held(client._scheduler)
        assert held == client.stats()["cached_tokens"] > 100, "entries hold more than their tokens"
    for answers in talks:
        for before, answer in pairwise(answers):
            # The last token that was sampled is known, but nothing was computed from it.
            assert answer.info["reused_tokens"] == len(before.trace.token_ids) - 1
        for answer in answers:
            found = answer.trace.completion_logprobs
            assert found == pytest.approx(plain_logprobs(model, answer), abs=2e-5)
