"""A stand-in for a vLLM server that fails on demand, as a real one will not."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

from ludic.distributed.host_copy import HostCopy
from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.vllm.shared_memory import open_shared
from ludic.inference.vllm.flags import STAGE

Handler = Callable[[web.Request], Any]

ROUTES = (
    *("/v1/models", "/version", "/openapi.json", "/health"),
    *("/inference/v1/generate", "/v1/completions", "/pause", "/resume"),
    *("/finish_weight_update", "/collective_rpc"),
    *("/reset_prefix_cache", "/get_world_size", "/weight_info"),
)


@dataclass
class FakeVLLM:
    """Answers like vLLM, except where `faults` has an answer for the path, or for `STAGE`: the
    call of the workers that begins an update, or drops it."""

    routes: tuple[str, ...] = ROUTES
    faults: dict[str, Handler] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    version: str = "default"
    paused: bool = False
    active: bool = False
    staged: dict[str, list[Any]] = field(default_factory=dict)
    applied: int = 0
    copy: HostCopy | None = None
    bodies: list[Any] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        named = isinstance(body, dict) and body.get("method") == STAGE
        what = STAGE if named else request.path
        self.calls[what] += 1
        self.order.append(what)
        fault = self.faults.get(what) or self.faults.get(request.path)
        if fault is not None:
            found = fault(request)
            found = await found if asyncio.iscoroutine(found) else found
            if isinstance(found, web.StreamResponse):
                return found
            if found is not None:
                return web.json_response(found)
        if request.path not in self.routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(self._reply(request.path, body))

    def _reply(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": 128}]}
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/openapi.json":
            return {"paths": {route: {} for route in self.routes}}
        if path in ("/inference/v1/generate", "/v1/completions"):
            return self._completion(path, body)
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/collective_rpc":
            if body["method"] == STAGE:
                self._stage(body["args"][0])
            holds = None if self.copy is None else self.copy.holds
            answer = {"tensors": self.staged, "applied": self.applied, "holds": holds}
            return {"results": [answer]}
        self._control(path, body)
        return {"message": "done"}

    def _control(self, path: str, body: Any) -> None:
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/finish_weight_update":
            self.applied += bool(self.staged)
            self.active, self.staged = False, {}
            self.version = (body or {}).get("weight_version", self.version)

    def _stage(self, update: Any) -> None:
        self.active, self.staged = update is not None, {}
        if update is not None and update["plane"] == "shared_memory":
            pairs, copy = dict(open_shared(Path(update["path"]))), update.get("copy")
            if copy is not None:
                self.copy = self.copy or HostCopy(copy["key"])
                pairs = self.copy.bring(copy["name"], pairs, base=copy["base"])
            self.staged = receipt(pairs.items())

    def _completion(self, path: str, body: Any) -> Any:
        self.bodies.append(body)
        if not body:
            return {"choices": []}
        ids = [7, 8, 9]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": ids}
        if path == "/v1/completions":
            choice |= {"text": "abc", "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]}}
        else:
            choice["logprobs"] = {"content": [{"token_id": i, "logprob": -1.0} for i in ids]}
            choice["weight_versions"] = [{"version": self.version, "start": 0, "end": 3}]
        return {"choices": [choice]}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self.answer)
        server = TestServer(app)
        await server.start_server()
        self.url = str(server.make_url("")).rstrip("/")
        try:
            yield self
        finally:
            await server.close()


def failing(status: int, times: int = 10**9, **headers: str) -> Handler:
    """Answers with an error so many times, then as usual."""
    left = [times]

    def answer(_: web.Request) -> Any:
        if left[0] <= 0:
            return None
        left[0] -= 1
        body = {"error": {"message": f"made to fail with {status}"}}
        return web.json_response(body, status=status, headers=headers)

    return answer


def receipts(fake: FakeVLLM, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Handler:
    """Its workers' answers as usual, but changed."""

    async def answer(request: web.Request) -> Any:
        reply = fake._reply(request.path, await request.json())
        return {"results": [change(result) for result in reply["results"]]}

    return answer


async def hanging(_: web.Request) -> Any:
    """Never answers."""
    await asyncio.sleep(3600)


def vanishing(request: web.Request) -> Any:
    """Cuts the connection, as a server does that dies."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def blinking() -> Handler:
    """Cuts one connection, then answers as usual."""
    left = [1]
    return lambda request: vanishing(request) if left and left.pop() else None


@contextmanager
def dark_address() -> Iterator[str]:
    """An address where nobody answers, not even that nobody is there: a host that went dark."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(4):  # more than the backlog holds
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"
