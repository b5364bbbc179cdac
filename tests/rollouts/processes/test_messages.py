"""Messages that cannot be read cost what they are about, and no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ludic.errors import SerializationError
from ludic.plumbing.text import REPLACEMENT
from ludic.rollouts.processes.messages import Answer, Played, raised_error, sent_error
from ludic.rollouts.processes.pool import _LostEpisode, _Process
from ludic.rollouts.processes.worker import Worker


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
