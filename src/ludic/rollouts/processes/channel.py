"""Messages between a run and the processes that play its episodes.

What is put during one turn of the event loop travels as one block: pickling and a system call cost
more than a message. Both ends are this program and the socket has no name, so pickling is safe.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

from ludic.errors import LudicError

Message = tuple[Any, ...]
_LENGTH = struct.Struct("<Q")


class Channel(asyncio.Protocol):
    """One end. `put` may be called before `open` has returned; messages keep their order.

    `on_message` is called for each that comes, `on_end` once, when the other end is gone or the
    channel is closed. `instead` is asked for what to send in place of a message that cannot be
    pickled.
    """

    def __init__(
        self,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
        instead: Callable[[Message, Exception], Message],
    ) -> None:
        self._on_message, self._on_end, self._instead = on_message, on_end, instead
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[Message] = []
        self._received = bytearray()
        self._ended = False

    async def open(self, end: socket.socket) -> None:
        """Begins to send and to receive through `end`."""
        await self._loop.create_unix_connection(lambda: self, sock=end)

    def put(self, *message: Any) -> None:
        """Sends a message, with whatever else is put before the event loop turns."""
        if not self._waiting and self._transport is not None:
            self._loop.call_soon(self._send)
        self._waiting.append(message)

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
            end = begin + _LENGTH.unpack_from(received, start)[0]
            if len(received) < end:
                break
            block = pickle.loads(memoryview(received)[begin:end].tobytes())
            start = end
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
        try:
            data = pickle.dumps(block, pickle.HIGHEST_PROTOCOL)
        except Exception:  # pickling runs code of whatever it is given
            data = pickle.dumps([self._sendable(m) for m in block], pickle.HIGHEST_PROTOCOL)
        self._transport.writelines((_LENGTH.pack(len(data)), data))

    def _sendable(self, message: Message) -> Message:
        try:
            pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception as exc:
            return self._instead(message, exc)
        return message


def sent_error(error: BaseException) -> tuple[type[BaseException], str]:
    """An error as it travels: constructors differ, so it goes as its type and its text."""
    known = isinstance(error, LudicError)
    return (type(error), str(error)) if known else (LudicError, f"{type(error).__name__}: {error}")


def raised_error(kind: type[BaseException], text: str) -> BaseException:
    """The error that `sent_error` took apart, without what only its constructor knew."""
    error = kind.__new__(kind, text)
    error.args = (text,)
    return error
