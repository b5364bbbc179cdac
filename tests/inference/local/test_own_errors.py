"""What goes wrong for one request is that request's error; the others are served on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ludic.errors import ConfigError, EngineClosedError, InferenceError, OutOfMemoryError
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import SamplingConfig
from tests.inference.local import by_hand
from tests.inference.local.asking import MODES, request, until

_BAD = 77
"""The first token of the prompt for which something raises."""


def _raise_in(owner: Any, name: str, error: Exception, when: Callable[..., bool]) -> None:
    inner = getattr(owner, name)

    def broken(*args: Any) -> Any:
        if when(*args):
            raise error
        return inner(*args)

    setattr(owner, name, broken)


async def _beside_a_good_one(client: LocalChatClient, **sampling: Any) -> Any:
    """The bad request's result, with a good one in flight and another one after it."""
    good = asyncio.create_task(
        client.complete_tokens(request([1, 2, 3], max_tokens=100, seed=1, ignore_eos=True))
    )
    await until(lambda: client.stats()["running"] == 1)
    bad = request([_BAD] * 20, max_tokens=5, seed=9, ignore_eos=True, timeout_s=10.0, **sampling)
    (result,) = await asyncio.gather(client.complete_tokens(bad), return_exceptions=True)
    answer = await good
    assert answer.trace is not None
    assert len(answer.trace.completion_token_ids) == 100
    after = await client.complete_tokens(request([4], max_tokens=3, seed=1, ignore_eos=True))
    assert after.trace is not None
    stats = client.stats()
    assert stats["slots_taken"] == stats["running"] == stats["waiting"] == 0
    return result


@pytest.mark.parametrize("mode", MODES)
async def test_a_tokenizer_that_raises_fails_the_request_whose_text_it_was(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    cause = TypeError("no such piece")
    async with LocalChatClient(model, tokenizer, max_slots=4, **mode) as client:
        _raise_in(client._scheduler, "decode", cause, lambda ids: len(ids) == 5)
        result = await _beside_a_good_one(client)
    assert isinstance(result, InferenceError)
    assert "seed 9" in str(result)
    assert "no such piece" in str(result)
    assert result.__cause__ is cause


@pytest.mark.parametrize("mode", MODES)
async def test_a_look_for_stop_strings_that_raises_fails_the_request_that_has_them(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    async with LocalChatClient(model, tokenizer, max_slots=4, **mode) as client:
        _raise_in(client._scheduler, "spell", ValueError("bad bytes"), lambda ids: True)
        result = await _beside_a_good_one(client, stop=("never written",))
    assert isinstance(result, InferenceError)
    assert "bad bytes" in str(result)


@pytest.mark.parametrize("mode", MODES)
async def test_no_memory_for_the_prefix_store_means_that_nothing_is_cached(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    async with LocalChatClient(model, tokenizer, max_slots=4, **mode) as client:
        _raise_in(client._scheduler.store, "add", error, lambda tokens, kv: tokens[0] == _BAD)
        result = await _beside_a_good_one(client)
    assert result.trace is not None
    assert len(result.trace.completion_token_ids) == 5


@pytest.mark.parametrize("mode", MODES)
async def test_no_memory_for_a_slot_fails_the_request_that_was_to_have_it(
    model: Any, tokenizer: Any, mode: Any
) -> None:
    cause = torch.OutOfMemoryError("CUDA out of memory")
    async with LocalChatClient(model, tokenizer, max_slots=4, **mode) as client:
        _raise_in(client._scheduler.memory, "place", cause, lambda s, n: s.tokens[0] == _BAD)
        result = await _beside_a_good_one(client)
    assert isinstance(result, OutOfMemoryError)
    assert "max_slots" in str(result)
    assert result.__cause__ is cause


async def test_no_memory_for_a_longer_slot_fails_the_request_that_outgrew_its_own(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer, max_slots=4) as client:
        _raise_in(
            client._scheduler.memory, "place", torch.OutOfMemoryError("full"), lambda s, n: n > 64
        )
        with pytest.raises(OutOfMemoryError, match="60 tokens"):
            await client.complete_tokens(request(range(60), max_tokens=30, ignore_eos=True))
        answer = await client.complete_tokens(request([1], max_tokens=3))
        assert answer.trace is not None


def test_admission_that_is_broken_off_loses_nobody() -> None:
    scheduler = by_hand.scheduler(step_rows=4, max_slots=8)
    heard: list[Any] = []
    first, like_it, other = (by_hand.sequence(p, 5, heard) for p in ([3] * 40, [3] * 40, [5, 6, 7]))
    scheduler.waiting.extend([first])
    scheduler.advance()
    scheduler.waiting.extend([like_it, other])
    inner = scheduler.memory.place

    def place(tenant: Any, tokens: int) -> None:
        if tenant is other:
            raise SystemExit
        inner(tenant, tokens)

    scheduler.memory.place = place  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        scheduler.advance()
    # The first of them was put off, since it waits for what is being computed.
    assert list(scheduler.waiting) == [like_it, other]
    scheduler.abandon(lambda: EngineClosedError("gone"))
    assert len(heard) == 3


def test_a_slot_that_cannot_be_freed_still_lets_its_request_know() -> None:
    """The engine ends by it, and the request must not wait for its deadline."""
    for broken_text in (False, True):
        scheduler = by_hand.scheduler(step_rows=4, max_slots=8)
        heard: list[Any] = []
        scheduler.waiting.append(by_hand.sequence([1, 2], 1, heard))
        if broken_text:
            _raise_in(scheduler, "decode", ValueError("?"), lambda ids: True)

        def release(tenants: Any, *, wipe: bool = False) -> list[tuple[int, int]]:
            raise RuntimeError("the device is lost")

        scheduler.memory.release = release  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="lost"):
            scheduler.advance()
        assert len(heard) == 1
        assert isinstance(heard[0], InferenceError) is broken_text


async def test_an_engine_that_ended_says_why_to_later_requests(model: Any, tokenizer: Any) -> None:
    client = LocalChatClient(model, tokenizer)
    fault = RuntimeError("the device is lost")

    def advance() -> None:
        raise fault

    client._scheduler.advance = advance  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(EngineClosedError, match=r"device is lost.*LocalChatClient") as caught:
            await client.complete_tokens(request([1], max_tokens=1))
        assert caught.value.__cause__ is fault
    await client.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stop": (5,)}, "stop"),
        ({"stop": ("\ud800",)}, "stop.*UTF-8"),
        ({"stop": ("",)}, "stop"),
        ({"top_k": 5.0}, "top_k=5.0: must be an int"),
        ({"top_k": True}, "top_k=True"),
        ({"max_tokens": 2.5}, "max_tokens=2.5: must be an int"),
        ({"max_tokens": True}, "max_tokens=True"),
    ],
)
def test_sampling_settings_of_a_wrong_type_are_named(wrong: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SamplingConfig(**wrong)


async def test_numpy_integers_and_any_text_are_taken(model: Any, tokenizer: Any) -> None:
    settings: dict[str, Any] = {
        "top_k": np.int64(5),
        "max_tokens": np.int32(4),
        "stop": ("\n\n", "終わり", "🙂"),
    }
    async with LocalChatClient(model, tokenizer) as client:
        answer = await client.complete_tokens(request([1], ignore_eos=True, **settings))
    assert answer.trace is not None
    assert len(answer.trace.completion_token_ids) == 4
