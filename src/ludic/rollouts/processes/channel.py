"""Messages between a run and the processes that play its episodes.

A message is a list of plain values in msgpack; what has a type of its own is in it as JSON, which
checks every field. What is put during one turn of the event loop travels as one block: a system
call costs more than a message.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from ludic import errors
from ludic.errors import LudicError, SerializationError
from ludic.plumbing.text import error_text, words_of

Message = list[Any]
MAX_BLOCK_BYTES = 1 << 30
_LENGTH = struct.Struct("<Q")
_read_block = msgspec.msgpack.Decoder(list[Message]).decode


class Channel(asyncio.Protocol):
    """One end. `put` may be called before `open` has returned; messages keep their order.

    `on_message` is called for each that comes, `on_end` once, when the other end is gone, the
    channel is closed, or what came is no message.
    """

    def __init__(self, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[msgspec.Raw] = []
        self._received = bytearray()
        self._ended = False

    async def open(self, end: socket.socket) -> None:
        """Begins to send and to receive through `end`."""
        await self._loop.create_unix_connection(lambda: self, sock=end)

    def put(self, *message: Any) -> None:
        """Sends a message, with whatever else is put before the event loop turns. One that cannot
        be encoded is a `SerializationError`, here, where only its sender hears of it."""
        try:
            encoded = msgspec.Raw(msgspec.msgpack.encode(message))
        except (TypeError, ValueError, OverflowError) as exc:
            raise SerializationError(f"a message that cannot be sent: {exc}") from exc
        if not self._waiting and self._transport is not None:
            self._loop.call_soon(self._send)
        self._waiting.append(encoded)

    def close(self) -> None:
        """Ends the channel; what was put is still sent."""
        self._send()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        received, start = self._received, 0
        received += data
        while len(received) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            size = _LENGTH.unpack_from(received, start)[0]
            if size > MAX_BLOCK_BYTES:
                raise SerializationError(f"a block of {size:,} bytes is over the limit")
            if len(received) < begin + size:
                break
            block = _read_block(memoryview(received)[begin : begin + size].tobytes())
            start = begin + size
            for message in block:
                self._on_message(message)
        del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._ended:
            self._ended = True
            self._on_end()

    def _send(self) -> None:
        if self._transport is None or not self._waiting:
            return
        block, self._waiting = self._waiting, []
        data = msgspec.msgpack.encode(block)
        self._transport.writelines((_LENGTH.pack(len(data)), data))


def sent_error(error: BaseException) -> tuple[str, str]:
    """An error as it travels: constructors differ, so it goes as its type's name and its text."""
    name = type(error).__name__
    known = getattr(errors, name, None) is type(error)
    return (name, words_of(error)) if known else ("LudicError", error_text(error))


def raised_error(name: str, text: str) -> LudicError:
    """The error that `sent_error` took apart, without what only its constructor knew."""
    kind = getattr(errors, name, LudicError)
    kind = kind if isinstance(kind, type) and issubclass(kind, LudicError) else LudicError
    error: LudicError = kind.__new__(kind, text)
    error.args = (text,)
    return error
