"""Cancellation, deadlines, back-pressure, shutdown, stops, statistics."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ludic.errors import DeadlineError, EngineClosedError, QueueFullError
from ludic.inference.client import ChatClient, VersionedClient
from ludic.inference.local import LocalChatClient
from ludic.plumbing.records import changed
from ludic.sharding.world import work_on
from ludic.types import FinishReason
from tests.inference.local.asking import MODES, ask_all, request, until


async def test_it_is_a_versioned_chat_client(model: Any, tokenizer: Any) -> None:
    async with LocalChatClient(model, tokenizer, max_context_tokens=100, version=3) as client:
        assert isinstance(client, ChatClient)
        assert isinstance(client, VersionedClient)
        assert client.max_context_tokens == 100
        assert await client.get_policy_version() == 3


async def test_a_prompt_that_its_owner_writes_on_stays_as_it_was(
    model: Any, tokenizer: Any
) -> None:
    ids: Any = [1, 2, 3]
    async with LocalChatClient(model, tokenizer) as client:
        asked = changed(request(ids, max_tokens=2, ignore_eos=True), prompt_token_ids=ids)
        answer = await client.complete_tokens(asked)
    ids.append(4)
    assert answer.trace is not None
    assert answer.trace.prompt_token_ids == (1, 2, 3)
    assert answer.trace.token_ids[:3] == (1, 2, 3)


@pytest.mark.parametrize("mode", MODES)
async def test_cancelling_a_request_frees_its_slot_and_the_others_go_on(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    async with LocalChatClient(model, tokenizer, max_slots=2, **mode) as client:
        long = [
            asyncio.create_task(
                client.complete_tokens(request([1, 2, i], max_tokens=900, seed=i, ignore_eos=True))
            )
            for i in range(2)
        ]
        await until(lambda: client.stats()["running"] == 2)
        for task in long:
            task.cancel()
        answer = await client.complete_tokens(
            request([5, 6], max_tokens=4, seed=1, ignore_eos=True)
        )
        assert answer.trace is not None
        assert len(answer.trace.completion_token_ids) == 4
        for task in long:
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: client.stats()["slots_taken"] == 0)
        assert client.stats()["cancelled"] == 2


async def test_a_request_past_its_deadline_says_what_was_waited_for(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        slow = request([1, 2], max_tokens=1000, seed=0, ignore_eos=True, timeout_s=0.05)
        with pytest.raises(DeadlineError, match="completion"):
            await client.complete_tokens(slow)
        await until(lambda: client.stats()["slots_taken"] == 0)


async def test_a_full_queue_refuses_when_told_to(model: Any, tokenizer: Any) -> None:
    async with LocalChatClient(
        model, tokenizer, max_slots=1, max_queue=1, on_full="raise"
    ) as client:
        one = asyncio.create_task(
            client.complete_tokens(request([1], max_tokens=900, seed=0, ignore_eos=True))
        )
        await until(lambda: client.stats()["running"] == 1)
        two = asyncio.create_task(client.complete_tokens(request([2], max_tokens=1, seed=0)))
        await until(lambda: client.stats()["waiting"] == 1)
        with pytest.raises(QueueFullError, match="max_queue"):
            await client.complete_tokens(request([3], max_tokens=1, seed=0))
        one.cancel()
        assert (await two).trace is not None


async def test_a_full_queue_makes_the_next_request_wait_for_its_turn(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer, max_slots=2, max_queue=2) as client:
        answers = await ask_all(
            client, [request([i], max_tokens=5, seed=i, ignore_eos=True) for i in range(40)]
        )
        assert len(answers) == 40
        assert client.stats()["waiting"] == 0


async def test_waiting_for_a_place_in_the_queue_has_a_deadline_too(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer, max_slots=1, max_queue=1) as client:
        tasks = [
            asyncio.create_task(
                client.complete_tokens(request([1], max_tokens=1000, seed=0, ignore_eos=True))
            )
            for _ in range(3)
        ]
        await until(lambda: client.stats()["running"] == 1 and client.stats()["waiting"] == 1)
        with pytest.raises(DeadlineError, match="place in the queue"):
            await client.complete_tokens(request([3], max_tokens=1, seed=0, timeout_s=0.05))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answer = await client.complete_tokens(request([3], max_tokens=1, seed=0))
        assert answer.trace is not None


@pytest.mark.parametrize("mode", MODES)
async def test_closing_ends_what_is_running_and_what_waits(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    client = LocalChatClient(model, tokenizer, max_slots=2, max_queue=2, **mode)
    tasks = [
        asyncio.create_task(
            client.complete_tokens(request([i, 9], max_tokens=1000, seed=i, ignore_eos=True))
        )
        for i in range(8)
    ]
    await until(lambda: client.stats()["running"] == 2)
    await client.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineClosedError)
    with pytest.raises(EngineClosedError, match="closed"):
        await client.complete_tokens(request([1], max_tokens=1))
    await client.close()


async def test_the_event_loop_never_waits_for_a_step(model: Any, tokenizer: Any) -> None:
    """While a step is held up, the loop goes on turning."""
    async with LocalChatClient(model, tokenizer) as client:
        inner, turns = client._scheduler.advance, 0

        def held_up() -> None:
            time.sleep(0.3)
            inner()

        client._scheduler.advance = held_up  # type: ignore[method-assign]
        task = asyncio.create_task(client.complete_tokens(request([1], max_tokens=1, seed=0)))
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10


async def test_one_client_serves_several_event_loops(model: Any, tokenizer: Any) -> None:
    client = LocalChatClient(model, tokenizer)
    ask = request([1, 2, 3], max_tokens=5, seed=7)
    here = await client.complete_tokens(ask)
    there = await asyncio.to_thread(lambda: asyncio.run(client.complete_tokens(ask)))
    assert here.trace == there.trace
    await client.close()


async def test_a_stop_string_ends_the_completion_and_stays_part_of_it(
    model: Any, tokenizer: Any
) -> None:
    free = request([10, 11], max_tokens=60, seed=4, ignore_eos=True)
    async with LocalChatClient(model, tokenizer) as client:
        whole = await client.complete_tokens(free)
        assert whole.trace is not None
        ids = whole.trace.completion_token_ids
        wanted = next(
            i for i in range(5, 59) if ids[i] < 128 and ids[i + 1] < 128 and ids[i] != ids[i + 1]
        )
        stop = tokenizer.decode(list(ids[wanted : wanted + 2]))
        cut = await client.complete_tokens(
            request([10, 11], max_tokens=60, seed=4, ignore_eos=True, stop=(stop,))
        )
        assert cut.trace is not None
        assert cut.finish_reason is FinishReason.STOP
        n = len(cut.trace.completion_token_ids)
        assert cut.trace.completion_token_ids == ids[:n]
        assert stop in tokenizer.decode(list(ids[:n]))
        assert stop not in tokenizer.decode(list(ids[: n - 1]))


async def test_a_stop_string_that_never_comes_ends_at_the_limit(model: Any, tokenizer: Any) -> None:
    async with LocalChatClient(model, tokenizer, max_context_tokens=64) as client:
        ask = request([1, 2], seed=0, stop=("never to be written",), ignore_eos=True)
        answer = await client.complete_tokens(ask)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.trace is not None
    assert len(answer.trace.token_ids) == 64


@pytest.mark.parametrize("mode", MODES)
async def test_stop_ids_and_the_end_token_end_the_completion(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    asks = [request([i], max_tokens=500, seed=i, stop_token_ids=(33, 44)) for i in range(30)]
    async with LocalChatClient(model, tokenizer, **mode) as client:
        answers = await ask_all(client, asks)
    for answer in answers:
        assert answer.trace is not None
        *before, last = answer.trace.completion_token_ids
        assert not {33, 44, tokenizer.eos_token_id} & set(before)
        if answer.finish_reason is FinishReason.STOP:
            assert last in (33, 44, tokenizer.eos_token_id)
        else:
            assert len(before) == 499


async def test_a_request_without_a_seed_gets_one_of_its_own(model: Any, tokenizer: Any) -> None:
    asks = [request([1, 2], max_tokens=12, ignore_eos=True) for _ in range(2)]
    async with LocalChatClient(model, tokenizer) as client:
        a, b = await ask_all(client, asks)
        again = await client.complete_tokens(
            request([1, 2], max_tokens=12, ignore_eos=True, seed=a.info["seed"])
        )
    assert a.trace != b.trace
    assert a.trace == again.trace


async def test_statistics_count_what_happened(model: Any, tokenizer: Any) -> None:
    prompt = range(40)
    asks = [request(prompt, max_tokens=10, seed=i, ignore_eos=True) for i in range(8)]
    async with LocalChatClient(model, tokenizer, max_slots=4) as client:
        await ask_all(client, asks)
        stats = client.stats()
    assert stats["finished"] == 8
    assert stats["generated_tokens"] == 80
    assert stats["prompt_tokens"] == 320
    # The prompt is computed once, but for the last token, which each needs for its logits.
    assert stats["reused_tokens"] == 7 * 39
    assert 0 < stats["occupancy"] <= 1
    assert stats["tokens_per_s"] > 0
    assert stats["queue_seconds_mean"] > 0
    assert stats["running"] == stats["slots_taken"] == stats["waiting"] == 0


async def test_threads_that_compute_take_up_the_number_of_torchs_threads(
    model: Any, tokenizer: Any
) -> None:
    products = ctypes.CDLL(torch._C.__file__)  # through which the library of its threads is seen
    threads = products.omp_get_max_threads
    before, wanted = torch.get_num_threads(), (os.cpu_count() or 1) + 1
    torch.set_num_threads(wanted)
    try:
        with ThreadPoolExecutor(1) as unprepared:
            assert unprepared.submit(threads).result() != wanted
        with ThreadPoolExecutor(1, initializer=work_on, initargs=(torch.device("cpu"),)) as pool:
            assert pool.submit(threads).result() == wanted
        async with LocalChatClient(model, tokenizer, deterministic=False) as client:
            seen: list[int] = []
            leave, scheduler = client._scheduler.on_admit, client._scheduler

            def on_admit() -> None:
                seen.append(threads())
                leave()

            scheduler.on_admit = on_admit
            await client.complete_tokens(request([5, 6], max_tokens=1, seed=1))
        assert seen == [wanted]
    finally:
        torch.set_num_threads(before)
