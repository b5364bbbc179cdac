"""The cache against no cache: random joins, leaves, cancellations and common prefixes."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import ReturnSpec
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from tests.inference.local.asking import plain_logprobs, request, until

MODEL, TOKENIZER = tiny_model(max_position_embeddings=256), tiny_tokenizer()


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Conversations with common beginnings; some are cancelled after a while."""
    stems = draw(
        st.lists(st.lists(st.integers(0, 257), min_size=1, max_size=70), min_size=1, max_size=3)
    )
    talk = st.fixed_dictionaries(
        {
            "stem": st.integers(0, len(stems) - 1),
            "cut": st.integers(1, 70),
            "own": st.lists(st.integers(0, 257), max_size=20),
            "turns": st.lists(st.integers(1, 15), min_size=1, max_size=3),
            "delay": st.integers(0, 5),
            "temperature": st.sampled_from([1.0, 1.0, 0.5, 2.0]),
            "scored": st.booleans(),
            "cancel": st.one_of(st.none(), st.none(), st.integers(0, 20)),
        }
    )
    return {
        "stems": stems,
        "talks": draw(st.lists(talk, min_size=1, max_size=8)),
        "max_slots": draw(st.sampled_from([1, 3, 8])),
        "cache": draw(st.sampled_from([0, 40, 300, None])),
        "mode": draw(
            st.sampled_from(
                [{"deterministic": True}, {"deterministic": False},
                 {"deterministic": False, "pipelined": True}]
            )
        ),
    }  # fmt: skip


async def carry_out(plan: dict[str, Any]) -> None:
    client = LocalChatClient(
        MODEL,
        TOKENIZER,
        max_slots=plan["max_slots"],
        prefix_cache_tokens=plan["cache"],
        **plan["mode"],
    )

    async def converse(number: int, talk: dict[str, Any]) -> list[Any]:
        await asyncio.sleep(0.002 * talk["delay"])
        ids = tuple(plan["stems"][talk["stem"]][: talk["cut"]] + talk["own"])
        answers = []
        for turn, length in enumerate(talk["turns"]):
            ask = request(
                ids,
                max_tokens=length,
                seed=100 * number + turn,
                ignore_eos=True,
                temperature=talk["temperature"],
                returns=ReturnSpec(prompt_logprobs=talk["scored"]),
            )
            answer = await client.complete_tokens(ask)
            assert answer.trace is not None
            answers.append(answer)
            ids = (*answer.trace.token_ids, 7, 8)
        return answers

    async with client:
        tasks = []
        for number, talk in enumerate(plan["talks"]):
            tasks.append(asyncio.create_task(converse(number, talk)))
            if talk["cancel"] is not None:
                asyncio.get_running_loop().call_later(0.002 * talk["cancel"], tasks[-1].cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: client.stats()["slots_taken"] == 0)
        if plan["cache"] is not None:
            assert client.stats()["cached_tokens"] <= plan["cache"]
    for result, talk in zip(results, plan["talks"], strict=True):
        if isinstance(result, BaseException):
            assert isinstance(result, asyncio.CancelledError)
            assert talk["cancel"] is not None
            continue
        for answer in result:
            assert answer.trace.completion_logprobs == pytest.approx(
                plain_logprobs(MODEL, answer, talk["temperature"]), abs=2e-5
            )


@settings(max_examples=10)
@given(plan=plans())
def test_whatever_comes_and_goes_every_logprob_is_that_of_a_plain_forward_pass(
    plan: dict[str, Any],
) -> None:
    asyncio.run(carry_out(plan))


async def storm(requests: int, mode: dict[str, Any]) -> None:
    """Random requests, a third of them cancelled, in waves; nothing must remain of them."""
    rng = random.Random(0)
    stems = [[rng.randrange(258) for _ in range(60)] for _ in range(5)]
    async with LocalChatClient(
        MODEL, TOKENIZER, max_slots=32, prefix_cache_tokens=4000, **mode
    ) as client:

        async def one(i: int) -> None:
            ids = stems[i % 5][: rng.randrange(1, 60)] + [rng.randrange(258) for _ in range(8)]
            ask = request(ids, max_tokens=rng.randrange(1, 24), seed=i)
            task = asyncio.create_task(client.complete_tokens(ask))
            if i % 3 == 0:
                asyncio.get_running_loop().call_later(rng.random() * 0.05, task.cancel)
            await asyncio.wait([task])

        memory = []
        for start in range(0, requests, requests // 10):
            await asyncio.gather(*(one(i) for i in range(start, start + requests // 10)))
            await until(lambda: client.stats()["slots_taken"] == 0)
            stats = client.stats()
            memory.append((stats["kv_bytes"], len(gc.get_objects())))
            assert stats["running"] == stats["waiting"] == 0
            assert stats["cached_tokens"] <= 4000
        assert stats["finished"] + stats["cancelled"] <= requests
        assert stats["finished"] >= requests // 2
        assert stats["failed"] == 0
        scheduler = client._scheduler
        assert not scheduler.running
        # The arenas are bounded by the slots, and what lives in Python does not grow with requests.
        assert memory[-1][0] <= 2 * 32 * 512 * scheduler.memory.shape.bytes_per_token
        assert memory[-1][1] - memory[4][1] < 0.05 * memory[4][1]


@pytest.mark.parametrize(
    "mode", [{"deterministic": True}, {"deterministic": False, "pipelined": True}]
)
async def test_five_hundred_requests_with_cancellations_leave_nothing_behind(mode: Any) -> None:
    await storm(500, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [{"deterministic": True}, {"deterministic": False, "pipelined": True}]
)
async def test_ten_thousand_requests_with_cancellations_leave_nothing_behind(mode: Any) -> None:
    await storm(10_000, mode)
