"""A key for all of a server's routes.

vLLM's own `--api-key` guards `/v1` and `/inference`, but leaves the routes open that pause a
server, call methods of its workers and change its weights. This middleware guards all of them.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ludic.inference.addresses import find_key

KEY_FILE = "LUDIC_SERVER_KEY_FILE"
"""The environment variable that names the file with the key. Never the key itself: an environment
is inherited, printed and recorded."""
OPEN = "/health"
"""What needs no key: it says that the server is there, and no more."""

App = Callable[..., Awaitable[None]]


def has_key(key: str, authorization: str) -> bool:
    """Whether a request's header has the key."""
    scheme, _, token = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode())


class KeyGuard:
    """ASGI middleware that vLLM loads by name (`--middleware`): without the key, HTTP 401."""

    def __init__(self, app: App) -> None:
        self._app = app
        key = find_key(None, os.environ[KEY_FILE], KEY_FILE)
        assert key is not None
        self._key = key

    async def __call__(self, scope: MutableMapping[str, Any], receive: App, send: App) -> None:
        asks = scope["type"] in ("http", "websocket") and scope["path"] != OPEN
        headers = {name.lower(): value for name, value in scope.get("headers", ())}
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if not asks or has_key(self._key, authorization):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            kind = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": kind})
            body = b'{"error": "this server wants the key of its run"}'
            await send({"type": "http.response.body", "body": body})
