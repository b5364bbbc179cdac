"""The vLLM servers of a client: how they are talked to, what they are, and which may serve."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from ludic.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    InferenceError,
    PublishError,
    RequestRejectedError,
)
from ludic.inference.retries import Backoff
from ludic.inference.vllm.replica import (
    PROBE_TEXT,
    Replica,
    ServerFacts,
    UnreachableError,
    ask,
    check_spelling,
    learn,
)
from ludic.inference.vllm.wire import version_number

_REMEMBERED_CONVERSATIONS = 65536


@dataclass(frozen=True, slots=True)
class _Connection:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


class VLLMServers:
    """Servers that hold the same model, in and out of rotation.

    A conversation stays with its server. One that was away is used again only when it has the
    weights of the expected version.
    """

    def __init__(
        self,
        replicas: tuple[Replica, ...],
        *,
        model: str | None,
        version: int,
        headers: Mapping[str, str],
        backoff: Backoff,
        max_concurrency: int,
        connect_timeout_s: float,
    ) -> None:
        self.replicas, self.model, self.first_version = replicas, model, version
        self.restore: Callable[[Replica], Awaitable[bool]] | None = None
        """Gives a server that was away the current adapter; False: there is none."""
        self._version = version
        self._headers, self._backoff = headers, backoff
        self._max_concurrency, self._connect_timeout_s = max_concurrency, connect_timeout_s
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._learning: dict[Replica, asyncio.Task[None]] = {}
        self._connection: _Connection | None = None
        self._closed = False

    # Life

    async def connect(self, *, tokenizer: Any = None, timeout_s: float = 30.0) -> None:
        """Asks the servers what they are, once. Raises when none answers, when one serves another
        model, or when `tokenizer` does not spell text as the servers do."""
        results = await asyncio.gather(
            *(self._learn(r, timeout_s) for r in self.replicas if r.facts is None),
            return_exceptions=True,
        )
        for found in results:
            if isinstance(found, BaseException) and not isinstance(
                found, (UnreachableError, DeadlineError)
            ):
                raise found
        known = [r for r in self.replicas if r.facts is not None]
        if not known:
            raise InferenceError(f"no vLLM server answers: {self._states()}. Are they up?")
        if tokenizer is not None:
            for replica in known:
                assert replica.facts is not None
                name = self.model or replica.facts.models[0]
                body = {"model": name, "prompt": PROBE_TEXT, "add_special_tokens": False}
                answer = await self.control(
                    replica, "POST", "/tokenize", body=body, timeout_s=timeout_s
                )
                check_spelling(replica.url, list(answer["tokens"]), tokenizer)

    async def close(self) -> None:
        """Closes the connections; requests after that are refused."""
        self._closed = True
        connection, self._connection = self._connection, None
        for task in list(self._learning.values()):
            task.cancel()
        if connection is not None:
            await connection.session.close()

    # What they are

    @property
    def version(self) -> int:
        """The version that servers are expected to have."""
        return self._version

    def expect_version(self, version: int) -> None:
        """Names the version that servers must have to be used after they were away."""
        self._version = version

    def in_rotation(self) -> list[Replica]:
        """The servers that requests may go to."""
        return [r for r in self.replicas if r.out is None and r.down_since is None]

    async def control(
        self,
        replica: Replica,
        method: str,
        path: str,
        *,
        body: Any = None,
        timeout_s: float | None = None,
        plain: bool = False,
    ) -> Any:
        """One exchange with a server's control routes, its status checked."""
        connection = await self._connect()
        # A connection of its own: a stale one would pass for a server that is gone.
        headers = {**self._headers, "Connection": "close"}
        url = replica.url + path
        return await ask(
            connection.session,
            method,
            url,
            body=body,
            timeout_s=timeout_s,
            headers=headers,
            plain=plain,
        )

    async def relearn(self, replica: Replica, timeout_s: float) -> ServerFacts:
        """Asks a server anew what it is; it may have been restarted as another."""
        replica.facts = None
        await self._learn(replica, timeout_s)
        assert replica.facts is not None
        return replica.facts

    async def replica_version(self, replica: Replica, timeout_s: float = 10.0) -> int:
        """The version that a server says it has. One that keeps none has what it was last brought
        to, unless it was restarted since."""
        if replica.facts is None:
            await self._learn(replica, timeout_s)
        if replica.serving.adapter is not None:
            answer = await self.control(replica, "GET", "/v1/models", timeout_s=timeout_s)
            has = any(card["id"] == replica.serving.adapter for card in answer["data"])
            return replica.serving.version if has else self.first_version
        if replica.facts is not None and replica.facts.names_versions:
            answer = await self.control(replica, "GET", "/weight_info", timeout_s=timeout_s)
            return version_number(answer["weight_version"], self.first_version)
        if replica.version != self.first_version and not await self._applied(replica, timeout_s):
            return self.first_version
        return replica.version

    async def _applied(self, replica: Replica, timeout_s: float) -> int:
        """How many updates a server has applied since it was started: 0 for one that cannot say,
        which has taken none."""
        body = {"method": "ludic_receipt"}
        try:
            answer = await self.control(
                replica, "POST", "/collective_rpc", body=body, timeout_s=timeout_s
            )
        except UnreachableError as exc:
            if exc.status != 500:  # what a worker without the method leads to
                raise
            return 0
        except RequestRejectedError:
            return 0
        return min((int(r.get("applied", 0)) for r in answer["results"]), default=0)

    # Which may serve

    async def _choose(self, conversation: str | None, failed: set[Replica]) -> Replica | None:
        """The conversation's server where it can serve, else the least loaded one that can; one
        that failed the request before comes last."""
        home = self._homes.get(conversation) if conversation is not None else None
        # Among equals the one that served least, so that a quiet run spreads as well.
        by_use = sorted(self.replicas, key=lambda r: r.served)
        ordered = sorted(by_use, key=lambda r: (r in failed, r is not home, r.in_flight))
        for replica in ordered:
            if replica.out is not None or time.monotonic() < replica.retry_at:
                continue
            if replica.lost or replica.facts is None:
                revival = self._revive(replica)
                if any(r.facts is not None and not r.lost and r.out is None for r in ordered):
                    continue  # nobody waits for one that is away while another serves
                await asyncio.shield(revival)
                if replica.lost or replica.facts is None or replica.out is not None:
                    continue
            if conversation is not None:
                self._homes[conversation] = replica
                self._homes.move_to_end(conversation)
                if len(self._homes) > _REMEMBERED_CONVERSATIONS:
                    self._homes.popitem(last=False)
            return replica
        return None

    def _another(self, failed: Replica) -> bool:
        return any(
            r is not failed and r.out is None and r.down_since is None for r in self.replicas
        )

    def _revive(self, replica: Replica) -> asyncio.Task[None]:
        """Finds out, once for all callers, whether a server that was away may serve again."""
        task = self._learning.get(replica)
        if task is None:
            task = asyncio.create_task(self._welcome(replica))
            self._learning[replica] = task
            task.add_done_callback(lambda _: self._learning.pop(replica, None))
        return task

    async def _welcome(self, replica: Replica) -> None:
        was_lost = replica.lost
        try:
            await self.relearn(replica, timeout_s=10.0)
            if was_lost and not (self.restore is not None and await self.restore(replica)):
                found = await self.replica_version(replica)
                # In a publish it may be ahead of what is expected of all.
                expected = max(self._version, replica.version)
                if found != expected:
                    replica.out = (
                        f"it was away and came back with version {found} instead of version "
                        f"{expected}; the next publish brings it back"
                    )
            replica.mark_up()
        except (UnreachableError, DeadlineError) as exc:
            replica.mark_down(str(exc), self._backoff.pause_s(replica.failures))
        except (InferenceError, ConfigError, PublishError) as exc:
            replica.out = str(exc)

    async def _learn(self, replica: Replica, timeout_s: float) -> None:
        connection = await self._connect()
        try:
            facts = await learn(connection.session, replica.url, self._headers, timeout_s)
        except (UnreachableError, DeadlineError) as exc:
            replica.mark_down(str(exc), self._backoff.pause_s(replica.failures))
            raise
        if self.model is not None and self.model not in facts.models:
            raise ConfigError(
                f"{replica.url} serves {list(facts.models)}, not {self.model!r}: give the client "
                "one of those names, or start the server with --served-model-name"
            )
        replica.facts = facts

    def _states(self) -> str:
        return "; ".join(r.describe() for r in self.replicas)

    async def _connect(self) -> _Connection:
        if self._closed:
            raise EngineClosedError(f"{self!r} is closed")
        loop = asyncio.get_running_loop()
        found = self._connection
        if found is not None and found.loop is loop and not found.session.closed:
            return found
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        )
        made = _Connection(loop, session, asyncio.Semaphore(self._max_concurrency))
        self._connection = made
        self._learning.clear()
        if found is not None:
            # Its sockets belong to a loop that may be closed, and then cannot be told so.
            with suppress(RuntimeError):
                await found.session.close()
        return made
