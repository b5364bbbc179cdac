"""A route with which a vLLM server goes over to the weights that it has staged, by itself.

vLLM has a route for each step: pause, apply, forget what was computed with the old weights, resume.
Between them sampling waits for whoever asks, and for 20 ms that vLLM sleeps after a pause. Here the
server takes all steps in one exchange, and a trainer that is killed half-way leaves no server
paused.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

SWITCH = "/ludic/switch"
"""GET: the route is there. POST: go over, to what is then called `weight_version`."""

App = Callable[..., Awaitable[Any]]


class SwitchRoute:
    """ASGI middleware that vLLM loads by name (`--middleware`)."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: App, send: App) -> None:
        if scope["type"] != "http" or scope["path"] != SWITCH:
            await self._app(scope, receive, send)
            return
        status, answer = 200, dict[str, Any]()
        if scope["method"] == "POST":
            try:
                asked = json.loads(await _body(receive) or b"{}")
                async with asyncio.timeout(float(asked.get("timeout_s", 120.0))):
                    answer = await _switch(scope["app"].state.engine_client, asked)
            except Exception as exc:
                status, answer = 500, {"error": {"message": f"{type(exc).__name__}: {exc}"}}
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def _switch(engine: Any, asked: MutableMapping[str, Any]) -> dict[str, Any]:
    """Where a step fails, the server stays paused: nobody knows what it would sample from."""
    seconds: dict[str, float] = {}
    began = time.perf_counter()
    with _timed("pause", seconds):
        # As `pause_generation`, which sleeps at its end. It also clears the caches.
        await engine.renderer.clear_mm_cache_async()
        await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
    with _timed("apply", seconds):
        named = asked.get("weight_version")
        await engine.finish_weight_update(*([] if named is None else [str(named)]))
    with _timed("resume", seconds):
        await engine.resume_generation()
    return {"seconds": seconds, "stall_s": time.perf_counter() - began}


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


async def _body(receive: App) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)
