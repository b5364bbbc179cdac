"""A server for programs that speak the chat completions API: loopback only, a key per session.

>>> async def serve(client, template):
...     async with ChatServer() as server:
...         session = server.open(Session(client, "my-model", template))
...         print(server.url, session.key)   # OPENAI_BASE_URL, OPENAI_API_KEY
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256

from aiohttp import web

from ludic.agents.programs.chat_api import ApiError, read_request
from ludic.agents.programs.session import Repetition, Session
from ludic.errors import ConfigError

MAX_BODY_BYTES = 32 * 1024 * 1024
_READ_S = 60.0
"""How long a request's body may take to arrive."""


class ChatServer:
    """Answers `/v1/chat/completions` and `/v1/models` for the sessions that are open, on a free
    port of 127.0.0.1. It runs on the event loop that opened it; programs live elsewhere, or in
    other threads or tasks."""

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        app = web.Application(client_max_size=max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self._sessions: dict[bytes, Session] = {}
        self._port: int | None = None

    @property
    def url(self) -> str:
        """The address to ask, for `OPENAI_BASE_URL`."""
        if self._port is None:
            raise ConfigError("this server is not open: use it in `async with`")
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> ChatServer:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._port = None
        for session in list(self._sessions.values()):
            await self.close(session)
        await self._runner.cleanup()

    def open(self, session: Session) -> Session:
        """From now on, whoever has the session's key may ask."""
        self._sessions[_digest(session.key)] = session
        return session

    async def close(self, session: Session) -> None:
        """Revokes its key, and breaks off what is still sampled for it."""
        self._sessions.pop(_digest(session.key), None)
        await session.end()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session_of(request)
            return await self._route(request)(request, session)
        except ConnectionResetError:  # the client is gone
            return web.Response(status=499)
        except ApiError as exc:
            error = exc
        except web.HTTPRequestEntityTooLarge:
            limit = f"the body is larger than {self._max_body_bytes} bytes"
            error = ApiError(413, limit, code="request_too_large")
        except Exception as exc:  # whatever happens, the program is answered in the API's format
            error = ApiError(500, f"{type(exc).__name__}: {exc}")
        return web.json_response(error.body(), status=error.status)

    def _session_of(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # Looked up by digest, so that the time it takes says nothing about the keys.
        asked = _digest(key.strip())
        session = self._sessions.get(asked) if scheme.lower() == "bearer" else None
        if session is None or _digest(session.key) != asked:  # which it loses when it ends
            message = "no open session has this key: send `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        return session

    def _route(
        self, request: web.Request
    ) -> Callable[[web.Request, Session], Awaitable[web.StreamResponse]]:
        path = request.path.rstrip("/")
        routes = {"/v1/chat/completions": ("POST", _complete), "/v1/models": ("GET", _models)}
        if path.startswith("/v1/models/"):
            routes[path] = ("GET", _models)
        if path not in routes:
            there = "there are /v1/chat/completions and /v1/models"
            raise ApiError(404, f"no such address as {path[:80]}: {there}", code="unknown_url")
        method, handler = routes[path]
        if request.method != method:
            raise ApiError(405, f"{path} takes only {method}", code="method_not_supported")
        return handler


async def _complete(request: web.Request, session: Session) -> web.StreamResponse:
    try:
        async with asyncio.timeout(_READ_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_READ_S:g} s") from None
    asked = read_request(body)
    headers = request.headers
    repetition = Repetition(
        sha256(body).digest(),
        headers.get("Idempotency-Key"),
        headers.get("x-stainless-retry-count", "0") not in ("", "0"),
    )
    async with session.answering(asked, repetition) as answer:
        if asked.stream:
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            for event in answer.events(include_usage=asked.include_usage):
                await response.write(event)
        else:
            response = web.json_response(answer.completion())
            await response.prepare(request)
        # Sent here and not by the framework: only so is it known whether there was anybody.
        await response.write_eof()
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError("the connection was cut before the answer was sent")
    return response


async def _models(request: web.Request, session: Session) -> web.StreamResponse:
    """There is one model, whatever name it is asked for by."""
    model = {"id": session.model, "object": "model", "created": 0, "owned_by": "ludic"}
    listed = request.path.rstrip("/") == "/v1/models"
    return web.json_response({"object": "list", "data": [model]} if listed else model)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
