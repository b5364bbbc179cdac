"""A proxy between a client and Redis whose line can be cut and mended."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Line:
    """Listens on loopback and passes bytes on to a unix socket, from a thread of its own."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        async def listen() -> None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            self._ready.set()

        self._loop.run_until_complete(listen())
        self._loop.run_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.close()
            return
        theirs, there = await asyncio.open_unix_connection(self._socket)
        self._writers |= {writer, there}
        await asyncio.gather(self._pass(reader, there), self._pass(theirs, writer))
        self._writers -= {writer, there}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()

    def cut(self) -> None:
        """Breaks every connection, and accepts no other."""

        def work() -> None:
            self._cut = True
            for writer in self._writers:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(work)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(setattr, self, "_cut", False)

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
