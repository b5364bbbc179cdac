"""Messages that cannot be read cost what they are about, and no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ludic.errors import SerializationError
from ludic.plumbing.text import REPLACEMENT
from ludic.rollouts.processes.messages import (
    Answer,
    Played,
    pack,
    pack_exactly,
    raised_error,
    sent_error,
    unpack,
)
from ludic.rollouts.processes.pool import _LostEpisode, _Process
from ludic.rollouts.processes.worker import Worker
from ludic.types import ChatResponse, FinishReason, Rollout


def test_an_errors_text_can_be_sent() -> None:
    sent = sent_error(ValueError("\ud800"))
    assert str(raised_error(sent)) == f"ValueError: {REPLACEMENT}"


async def test_rollouts_that_cannot_be_read_cost_their_episode() -> None:
    process = _Process.__new__(_Process)
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    process._playing = {3: outcome}
    step = b'{"kind":"environment","turn_index":0,"agent_steps":[],"obs":"","action":null,'
    step += b'"next_obs":"","reward":NaN}'
    process._take(Played(3, [b'{"id":"r","steps":[' + step + b"]}"]))
    with pytest.raises(_LostEpisode, match=r"cannot be read.*finite"):
        outcome.result()


async def test_a_response_that_cannot_be_read_is_its_askers_error() -> None:
    worker = Worker()
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    worker._asked = {5: answer}
    trace = b'{"prompt_token_ids":[-1],"completion_token_ids":[]}'
    worker._take(Answer(5, b'{"finish_reason":"stop","trace":' + trace + b"}"))
    with pytest.raises(SerializationError, match="prompt_token_ids"):
        answer.result()


@pytest.mark.parametrize("value", [1.5, float("inf"), 2**70, "half of a pair", [{"deep": None}]])
def test_records_come_back_as_they_were_sent(value: Any) -> None:
    rollout = Rollout(id="r", steps=(), meta={"value": value})
    assert unpack(Rollout, pack_exactly(rollout)) == rollout


@pytest.mark.parametrize("value", [(1, 2), "\ud800", object()])
def test_what_would_come_back_changed_is_refused(value: Any) -> None:
    with pytest.raises(SerializationError):
        pack_exactly(Rollout(id="r", steps=(), meta={"value": value}))


@pytest.mark.parametrize("noise", [b"", b"\xff", b"\x91" * 100_000, b"{", b"\x81\xa1x\x01"])
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(SerializationError):
        unpack(ChatResponse, noise)


def test_a_response_that_no_sampler_can_have_made_is_refused() -> None:
    data = pack(ChatResponse(None, FinishReason.STOP)).replace(b"stop", b"halt")
    with pytest.raises(SerializationError, match="ChatResponse"):
        unpack(ChatResponse, data)
