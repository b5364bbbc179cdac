"""Messages that cannot be sent or read cost what they are about, and no other."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from ludic.errors import SerializationError
from ludic.plumbing.text import REPLACEMENT
from ludic.rollouts.processes.channel import Channel, Message, raised_error, sent_error
from ludic.rollouts.processes.pool import _Process
from ludic.rollouts.processes.worker import Worker


async def test_a_message_that_cannot_be_sent_is_its_senders_error_and_drops_no_other() -> None:
    received: list[Message] = []
    arrived = asyncio.Event()

    def take(message: Message) -> None:
        received.append(message)
        if message == ["last"]:
            arrived.set()

    left, right = socket.socketpair()
    sender = Channel(lambda message: None, lambda: None)
    receiver = Channel(take, lambda: None)
    await receiver.open(right)
    await sender.open(left)
    sender.put("first", b"1")
    for bad in ("\ud800", object(), 2**70):
        with pytest.raises(SerializationError, match="cannot be sent"):
            sender.put("bad", bad)
    sender.put("last")
    async with asyncio.timeout(60):
        await arrived.wait()
    assert received == [["first", b"1"], ["last"]]
    sender.close()
    receiver.close()


def test_an_errors_text_can_be_sent() -> None:
    name, text = sent_error(ValueError("\ud800"))
    assert str(raised_error(name, text)) == f"ValueError: {REPLACEMENT}"


async def test_rollouts_that_cannot_be_read_cost_their_episode() -> None:
    process = _Process.__new__(_Process)
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    process._playing = {3: outcome}
    step = b'{"kind":"environment","turn_index":0,"agent_steps":[],"obs":"","action":null,'
    step += b'"next_obs":"","reward":NaN}'
    process._take(["played", 3, [b'{"id":"r","steps":[' + step + b"]}"], []])
    assert "cannot be read" in outcome.result()
    assert "finite" in outcome.result()


async def test_a_response_that_cannot_be_read_is_its_askers_error() -> None:
    worker = Worker()
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    worker._asked = {5: answer}
    trace = b'{"prompt_token_ids":[-1],"completion_token_ids":[]}'
    worker._take(["answer", 5, b'{"finish_reason":"stop","trace":' + trace + b"}"])
    with pytest.raises(SerializationError, match="prompt_token_ids"):
        answer.result()
