"""What is kept of sequences that ended, against a plain dictionary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import EngineClosedError
from ludic.inference.local import LocalChatClient
from ludic.inference.local.arena import Arena, KVShape
from ludic.inference.local.gpu import kept_tokens
from ludic.inference.local.gpu.kept_tokens import KeptTokens
from tests.inference.local.asking import ask_all, plain_logprobs, request

SLOTS, LENGTH, MOST = 4, 12, 40
SHAPE = KVShape(2, 3, 5, torch.float32, torch.device("cpu"))


def filled_arena() -> Arena:
    arena = Arena(SHAPE, LENGTH, SLOTS, SLOTS)
    arena.kv.copy_(torch.randn(arena.kv.shape, generator=torch.Generator().manual_seed(0)))
    return arena


batches = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, LENGTH)), max_size=3)


@given(st.lists(st.tuples(batches, st.integers(0, 5)), max_size=12))
def test_what_is_read_is_what_was_in_the_slot_when_it_was_kept(steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_tokens, "FIRST_TOKENS", 4)
        patch.setattr(kept_tokens, "_BYTES_AT_ONCE", 7 * SHAPE.bytes_per_token)
        arena = filled_arena()
        kept = KeptTokens(arena, MOST)
        held: list[tuple[Any, torch.Tensor]] = []
        for batch, dropped in steps:
            for slot, tokens in batch:
                while sum(len(places) for places, _ in held) + tokens > MOST:
                    kept.drop(held.pop(0)[0])
                held.append((kept.keep(slot, tokens), arena.read(slot, tokens).clone()))
            kept.write()
            arena.kv.mul_(-1.5)  # others have the slots now
            for _ in range(min(dropped, len(held))):
                kept.drop(held.pop()[0])
        taken = sum(len(places) for places, _ in held)
        assert kept.room - kept._free_count == taken
        for places, wanted in held:
            kept.read([(1, places), (3, places[:2])])
            assert torch.equal(arena.read(1, len(places)), wanted)
            assert torch.equal(arena.read(3, min(2, len(places))), wanted[:, :, :, :2])


def test_more_than_it_may_hold_is_an_error_and_no_endless_growth() -> None:
    kept = KeptTokens(filled_arena(), 10)
    kept.keep(0, 6)
    with pytest.raises(ValueError, match="more than 10"):
        kept.keep(1, 5)


@pytest.mark.parametrize("where", ["_grow", "write"])
async def test_without_memory_nothing_unwritten_is_ever_taken_for_computed(
    model: Any, tokenizer: Any, where: str
) -> None:
    options: Any = {"deterministic": False, "pipelined": True, "max_slots": 4}
    asks = [request(range(i, i + 30), seed=i, max_tokens=9, ignore_eos=True) for i in range(4)]
    async with LocalChatClient(model, tokenizer, **options) as client:
        scheduler: Any = client._scheduler
        calls = 0

        def fail(*args: Any) -> None:
            nonlocal calls
            calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

        working = getattr(scheduler.kept, where)
        setattr(scheduler.kept, where, fail)
        first = await ask_all(client, asks)
        setattr(scheduler.kept, where, working)
        asked = calls
        longer = [
            request((*a.trace.token_ids, 7), seed=i, max_tokens=5, ignore_eos=True)
            for i, a in enumerate(first)
            if a.trace
        ]
        second = await ask_all(client, longer)
        assert asked > 0
        if where == "_grow":
            assert client.stats()["cached_tokens"] == 0, "it asked again for what there is not"
    for answer in (*first, *second):
        assert answer.trace is not None
        found = answer.trace.completion_logprobs
        assert found == pytest.approx(plain_logprobs(model, answer), abs=2e-5)


async def test_a_fault_while_keeping_is_no_secret(model: Any, tokenizer: Any) -> None:
    options: Any = {"deterministic": False, "pipelined": True, "max_slots": 4}
    client = LocalChatClient(model, tokenizer, **options)
    scheduler: Any = client._scheduler
    scheduler.kept.write = lambda: 1 / 0

    async def ask() -> None:
        async with client:
            await client.complete_tokens(request(range(30), max_tokens=5))
            await client.complete_tokens(request(range(30), max_tokens=5))

    with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
        await ask()
