"""A route that makes a vLLM server switch to its staged weights by itself.

vLLM has a route for each step: pause, apply, drop what was computed with the old weights, resume.
Between them sampling waits for the caller, and for 20 ms that vLLM sleeps after a pause. Here the
server takes all steps in one request, and a trainer that is killed half-way leaves no server
paused. The request brings a canary, which waits in the engine when sampling resumes. So it is
scored before the requests that were held up, which are recomputed from their first token.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

SWITCH = "/ludic/switch"
"""GET: the route is there. POST: go over, to what is then called `weight_version`, and score the
tokens of `canary`, for whoever asks for `CANARY` then."""
CANARY = "/ludic/canary"
"""GET: the log-prob of each token after the first, as `scores`; None: it was not scored."""

App = Callable[..., Awaitable[Any]]

_YOUNG = 200_000
"""So many objects more than were freed before the young ones are looked through; Python's own
figure is 700."""


class SwitchRoute:
    """ASGI middleware that vLLM loads by name (`--middleware`)."""

    def __init__(self, app: App) -> None:
        self._app = app
        # The answers of many requests are hundreds of thousands of objects, and while the garbage
        # collector looks through them, the server handles no call.
        gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
        self._scoring: asyncio.Future[list[float] | None] | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: App, send: App) -> None:
        if scope["type"] != "http" or scope["path"] not in (SWITCH, CANARY):
            await self._app(scope, receive, send)
            return
        status, answer = 200, dict[str, Any]()
        if scope["path"] == CANARY:
            scoring = self._scoring
            answer["scores"] = None if scoring is None else await asyncio.shield(scoring)
        elif scope["method"] == "POST":
            try:
                order = {"timeout_s": 120.0, **json.loads(await _body(receive) or b"{}")}
                async with asyncio.timeout(float(order["timeout_s"])):
                    answer = await self._switch(scope["app"].state.engine_client, order)
            except Exception as exc:
                status, answer = 500, {"error": {"message": f"{type(exc).__name__}: {exc}"}}
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _switch(self, engine: Any, order: MutableMapping[str, Any]) -> dict[str, Any]:
        """Where a step fails, the server stays paused: nobody knows what it would sample from."""
        seconds: dict[str, float] = {}
        self._scoring = None
        began = time.perf_counter()
        with timed("pause", seconds):
            # As `pause_generation`, which sleeps at its end. It also clears the caches.
            await engine.renderer.clear_mm_cache_async()
            await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        with timed("apply", seconds):
            version = order.get("weight_version")
            await engine.finish_weight_update(*([] if version is None else [str(version)]))
        with timed("resume", seconds):
            if canary := order.get("canary"):
                self._scoring = await _begin_scoring(engine, canary, float(order["timeout_s"]))
            await engine.resume_generation()
        return {"seconds": seconds, "stall_s": time.perf_counter() - began}


async def _begin_scoring(
    engine: Any, tokens: list[int], limit_s: float
) -> asyncio.Future[list[float] | None]:
    """The engine has the canary when this returns, and computes it first when it samples again.
    If it is not, or not in time, the trainer asks in another way, and is told why."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    collector: Any = None
    with suppress(Exception):
        prompt = {"prompt_token_ids": tokens}
        collector = await engine.add_request(f"canary-{uuid4()}", prompt, params, priority=-1)

    async def scores() -> list[float] | None:
        with suppress(Exception):
            async with asyncio.timeout(limit_s):
                output = await collector.get()
                while not output.finished:
                    output = await collector.get()
            pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
            return [float(row[token].logprob) for token, row in pairs]
        return None

    return asyncio.create_task(scores())


@contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Notes in `seconds` how long its body takes, even when that raises."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - began


async def _body(receive: App) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)
