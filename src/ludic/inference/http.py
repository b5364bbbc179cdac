"""HTTP for clients of servers: connections per event loop, and one JSON exchange."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from ludic.errors import DeadlineError, EngineClosedError, InferenceError, RequestRejectedError
from ludic.inference.retries import retry_after_s

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LARGEST_ANSWER = 64 * 1024 * 1024


class UnreachableError(InferenceError):
    """A server that did not answer (`status` is None), or answered with an error that another try
    may mend."""

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True, slots=True)
class Connection:
    """What belongs to one event loop. `slots` bound the requests that are open at once; `unpooled`
    opens a connection for each exchange, since one that the server is about to close after a while
    of silence would pass for a server that is gone."""

    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    unpooled: aiohttp.ClientSession
    slots: asyncio.Semaphore

    async def close(self) -> None:
        """Ends what is open. A loop that runs in another thread does so itself, a little later:
        its sockets may be touched there only."""
        elsewhere = self.loop is not asyncio.get_running_loop() and self.loop.is_running()
        for session in (self.session, self.unpooled):
            with suppress(RuntimeError):  # the loop of these sockets is closed
                if elsewhere:
                    asyncio.run_coroutine_threadsafe(session.close(), self.loop)
                else:
                    await session.close()


class Connections:
    """The connections of a client that may be asked from several event loops in several threads:
    one `Connection` each, under a lock, since those threads share the table."""

    def __init__(
        self, owner: str, max_concurrency: int, connect_timeout_s: float | None = None
    ) -> None:
        self._owner, self._max_concurrency = owner, max_concurrency
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._lock = threading.Lock()
        self._closed = False
        self.by_loop: dict[asyncio.AbstractEventLoop, Connection] = {}

    async def get(self) -> Connection:
        """The connection of the running loop. Those of loops that are closed are given up; those
        of loops in other threads are in use."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self.check_open()
            connection = self.by_loop.get(loop)
            if connection is not None and not connection.session.closed:
                return connection
            closed = [self.by_loop.pop(k) for k in list(self.by_loop) if k.is_closed()]
            # Servers close after 5 s of silence; `slots` bound what is open, not the connector.
            pooled = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
            connection = Connection(
                loop,
                aiohttp.ClientSession(timeout=self._timeout, connector=pooled),
                aiohttp.ClientSession(
                    timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
                ),
                asyncio.Semaphore(self._max_concurrency),
            )
            self.by_loop[loop] = connection
        for other in closed:
            await other.close()
        return connection

    async def close(self) -> None:
        """Closes all; requests after that, and those that are open, end with an error."""
        with self._lock:
            self._closed = True
            connections = list(self.by_loop.values())
            self.by_loop.clear()
        for connection in connections:
            await connection.close()

    def check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"{self._owner} is closed: make another client")


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    body: Any = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    plain: bool = False,
) -> Any:
    """One exchange. Returns the JSON (`plain`: the text); raises `UnreachableError` for what
    another try may mend, `RequestRejectedError` for a refusal, `DeadlineError` past `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            async with session.request(method, url, json=body, headers=headers) as response:
                data = await response.content.read(_LARGEST_ANSWER)
                while not response.content.at_eof() and len(data) < _LARGEST_ANSWER:
                    data += await response.content.read(_LARGEST_ANSWER - len(data))
                status, answered = response.status, response.headers
                if status >= 500:
                    response.close()  # the server closes after such an answer: not to be reused
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as exc:
        # No connection in time is a TimeoutError as well, but not of the deadline's making.
        if isinstance(exc, TimeoutError) and not isinstance(exc, aiohttp.ClientError):
            raise DeadlineError("an answer", f"{method} {url}", timeout_s or 0.0) from exc
        raise UnreachableError(f"{url} did not answer: {type(exc).__name__}: {exc}") from exc
    except aiohttp.ClientError as exc:
        raise InferenceError(f"{url}: {type(exc).__name__}: {exc}") from exc
    refusal = f"{url} answered HTTP {status}: {_reason(data)}"
    if status in RETRIED_STATUSES:
        raise UnreachableError(refusal, status=status, retry_after_s=retry_after_s(answered))
    if status in (401, 403):
        raise RequestRejectedError(f"{refusal}. Check the api_key")
    if not 200 <= status < 300:
        raise RequestRejectedError(refusal)
    if plain:
        return data.decode("utf-8", "replace")
    try:
        return json.loads(data) if data else None
    except ValueError as exc:
        raise InferenceError(f"{url} did not answer with JSON: {_reason(data)}") from exc


def excerpt(value: Any, limit: int = 200) -> str:
    """The beginning of an answer, for an error."""
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[:limit] + "…"


def _reason(data: bytes, limit: int = 600) -> str:
    """The message in an error's body, whatever its shape."""
    try:
        part = json.loads(data)
        for key in ("error", "detail", "message"):
            if isinstance(part, Mapping) and key in part:
                part = part[key]
        if isinstance(part, str):
            return part[:limit]
    except ValueError:
        pass
    return data[:limit].decode("utf-8", "replace").strip() or "(no text)"
