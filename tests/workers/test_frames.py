"""Frames arrive whole, in order and in time, or are refused; a bad message costs no other."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import SerializationError
from ludic.plumbing.text import REPLACEMENT
from ludic.workers.frames import Channel, Frames, encode


class Text(msgspec.Struct, frozen=True, tag=True):
    value: Any


class Last(msgspec.Struct, frozen=True, tag=True):
    pass


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Frames]]:
    left, right = socket.socketpair()
    reader = Frames(right, 1000)
    yield left, reader
    left.close()
    reader.close()


def soon() -> float:
    return time.monotonic() + 60


@given(st.lists(st.binary(max_size=3000), max_size=5))
def test_frames_come_back_as_they_were_sent(contents: list[bytes]) -> None:
    left, right = map(Frames, socket.socketpair())
    for content in contents:
        left.send(content[:7], content[7:], deadline=soon())
    assert [right.receive(soon()) for _ in contents] == contents
    left.close()
    right.close()


def test_a_frame_larger_than_the_socket_takes_passes_through() -> None:
    left, right = map(Frames, socket.socketpair())
    content = bytes(5_000_000)
    sending = threading.Thread(target=left.send, args=(content,))
    sending.start()
    assert right.receive(soon()) == content
    sending.join()
    left.close()
    right.close()


def test_a_late_frame_is_a_timeout_and_nothing_of_it_is_lost(
    ends: tuple[socket.socket, Frames],
) -> None:
    left, reader = ends
    left.send(struct.pack(">I", 4) + b"ab")
    with pytest.raises(TimeoutError):
        reader.receive(time.monotonic() + 0.01)
    left.send(b"cd")
    assert reader.receive(soon()) == b"abcd"


def test_a_frame_that_nobody_takes_is_a_timeout() -> None:
    left, right = socket.socketpair()
    with pytest.raises(TimeoutError):
        Frames(left).send(bytes(50_000_000), deadline=time.monotonic() + 0.05)
    right.close()


def test_a_frame_over_the_limit_is_refused_by_its_length(
    ends: tuple[socket.socket, Frames],
) -> None:
    left, reader = ends
    left.send(struct.pack(">I", 1001))
    with pytest.raises(SerializationError, match="1,001 bytes; the limit is 1,000"):
        reader.receive(soon())


def test_an_end_in_the_middle_of_a_frame_is_an_end(ends: tuple[socket.socket, Frames]) -> None:
    left, reader = ends
    left.send(struct.pack(">I", 4) + b"ab")
    left.close()
    with pytest.raises(EOFError):
        reader.receive(soon())


def test_closing_wakes_whoever_waits() -> None:
    left, right = socket.socketpair()
    reader = Frames(right)
    woken = threading.Event()

    def wait() -> None:
        with pytest.raises((EOFError, OSError, ValueError)):
            reader.receive(soon())
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    reader.close()
    assert woken.wait(60)
    thread.join()
    left.close()


def test_what_an_environment_may_return_can_be_sent() -> None:
    value = {"reward": np.float32(0.5), "won": np.bool_(True), "said": ["half \ud800"]}
    sent = msgspec.msgpack.decode(encode(value))
    assert sent == {"reward": 0.5, "won": True, "said": [f"half {REPLACEMENT}"]}
    loop: list[Any] = []
    loop.append(loop)
    for bad in (object(), np.zeros(3), 2**70, loop):
        with pytest.raises(SerializationError, match="cannot be sent"):
            encode({"bad": bad})


async def test_a_message_that_cannot_be_sent_is_its_senders_error_and_drops_no_other() -> None:
    received: list[Any] = []
    arrived = asyncio.Event()

    def take(message: Any) -> None:
        received.append(message)
        if message == Last():
            arrived.set()

    left, right = socket.socketpair()
    sender = Channel(Text | Last, lambda message: None, lambda: None)
    receiver = Channel(Text | Last, take, lambda: None)
    await receiver.open(right)
    await sender.open(left)
    sender.put(Text("first"))
    for bad in ("\ud800", object(), 2**70):
        with pytest.raises(SerializationError, match="cannot be sent"):
            sender.put(Text(bad))
    sender.put(Last())
    async with asyncio.timeout(60):
        await arrived.wait()
    assert received == [Text("first"), Last()]
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    "noise",
    [
        struct.pack(">I", 2**31),
        struct.pack(">I", 3) + b"\x91\x01\x02",
        struct.pack(">I", 100_000) + b"\x91" * 100_000,
    ],
    ids=["a huge length", "no message", "a hundred thousand levels"],
)
async def test_noise_ends_the_channel(noise: bytes) -> None:
    received: list[Any] = []
    ended = asyncio.Event()
    left, right = socket.socketpair()
    channel = Channel(Text | Last, received.append, ended.set)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    await channel.open(right)
    with left:
        left.sendall(noise)
        async with asyncio.timeout(60):
            await ended.wait()
    assert received == []
