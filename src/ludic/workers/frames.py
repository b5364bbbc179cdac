"""How this process talks to its children: frames, each a length of four bytes and its content.

The content is msgpack, written by `encode`; inside a sandbox, where there is only the standard
library, it is bytes and JSON. A reader checks the length before it takes the content, and waits for
neither longer than it was told to. `Frames` is for code that blocks, `Channel` for an event loop.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from ludic.errors import SerializationError
from ludic.plumbing.text import clean_json

MAX_BYTES = 1 << 30
_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 20


def encode(value: Any) -> bytes:
    """Returns a value as msgpack; `SerializationError` for what cannot be sent. NumPy's scalars,
    common in environments, become Python's, and half of a surrogate pair is replaced."""
    try:
        try:
            return msgspec.msgpack.encode(value, enc_hook=_plain)
        except UnicodeEncodeError:
            return msgspec.msgpack.encode(clean_json(value), enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise SerializationError(f"a message that cannot be sent: {exc}") from exc


def _plain(value: Any) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{value!r:.200} is a {type(value).__name__}, which is not JSON")


class Frames:
    """One end of a socket, for code that blocks. One thread may send while another receives."""

    def __init__(self, end: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        end.setblocking(False)
        self._end, self._max_bytes = end, max_bytes
        self._received = bytearray()

    def send(self, *parts: bytes, deadline: float = math.inf) -> None:
        """Sends one frame. `TimeoutError` past the deadline, `OSError` if the other end is gone."""
        rest = memoryview(_framed(*parts))
        while rest:
            self._wait(select.POLLOUT, deadline)
            with suppress(BlockingIOError):
                rest = rest[self._end.send(rest[:_CHUNK]) :]

    def receive(self, deadline: float = math.inf) -> bytes:
        """Returns the next frame's content. `TimeoutError` past the deadline, which loses nothing
        that has come; `EOFError` or `OSError` if the other end is gone."""
        while (content := _next_frame(self._received, self._max_bytes)) is None:
            self._wait(select.POLLIN, deadline)
            with suppress(BlockingIOError):
                data = self._end.recv(_CHUNK)
                if not data:
                    raise EOFError("the other end is gone")
                self._received += data
        return content

    def close(self) -> None:
        """Ends both directions; whoever waits for a frame wakes up."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._end, event)
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(left):
            raise TimeoutError


class Channel(asyncio.Protocol):
    """One end of a socket, for an event loop. `put` may be called before `open` has returned;
    messages keep their order. What is put during one turn of the loop travels as one frame: a
    system call costs more than a message.

    Messages are read as `kind`, a union of tagged structs. `on_message` is called for each,
    `on_end` once, when the other end is gone, the channel is closed, or what came is no message.
    """

    def __init__(
        self, kind: Any, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode
        self._on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[msgspec.Raw] = []
        self._received = bytearray()
        self._ended = False

    async def open(self, end: socket.socket) -> None:
        """Begins to send and to receive through `end`."""
        await self._loop.create_unix_connection(lambda: self, sock=end)

    def put(self, message: msgspec.Struct) -> None:
        """Sends a message. One that cannot be encoded is a `SerializationError`, here, where only
        its sender hears of it."""
        encoded = msgspec.Raw(encode(message))
        if not self._unsent and self._transport is not None:
            self._loop.call_soon(self._send)
        self._unsent.append(encoded)

    def close(self) -> None:
        """Ends the channel; what was put is still sent."""
        self._send()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (content := _next_frame(self._received, MAX_BYTES)) is not None:
            for message in self._decode(content):
                self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._ended:
            self._ended = True
            self._on_end()

    def _send(self) -> None:
        if self._transport is not None and self._unsent:
            messages, self._unsent = self._unsent, []
            self._transport.write(_framed(msgspec.msgpack.encode(messages)))


def _framed(*parts: bytes) -> bytes:
    size = sum(map(len, parts))
    if size > MAX_BYTES:
        raise SerializationError(f"a message of {size:,} bytes; the limit is {MAX_BYTES:,}")
    return b"".join((_LENGTH.pack(size), *parts))


def _next_frame(received: bytearray, max_bytes: int) -> bytes | None:
    """Takes the first frame out of what has come, if all of it is there."""
    if len(received) < _LENGTH.size:
        return None
    size: int = _LENGTH.unpack_from(received)[0]
    if size > max_bytes:
        raise SerializationError(f"a message of {size:,} bytes; the limit is {max_bytes:,}")
    end = _LENGTH.size + size
    if len(received) < end:
        return None
    content = bytes(memoryview(received)[_LENGTH.size : end])
    del received[:end]
    return content
