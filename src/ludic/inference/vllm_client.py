"""`VLLMChatClient`: samples from one or more vLLM servers, token ids in and out."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from ludic.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    InferenceError,
    PublishError,
    RequestRejectedError,
)
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.retries import Backoff
from ludic.inference.vllm_replica import (
    PROBE_TEXT,
    Replica,
    ServerFacts,
    UnreachableError,
    ask,
    check_spelling,
    learn,
)
from ludic.inference.vllm_wire import (
    completions_body,
    generate_body,
    read_answer,
    version_number,
)
from ludic.types import ChatResponse, FinishReason

_REMEMBERED_CONVERSATIONS = 65536


@dataclass(frozen=True, slots=True)
class _Connection:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


class VLLMChatClient:
    """Samples from vLLM servers that hold the same model.

    A request goes to the server with the fewest requests, and a conversation stays with its
    server, whose prefix cache knows it. What may be retried (no connection, HTTP 429 and 5xx, a
    request that an update aborted) is retried with growing pauses, on another server where there
    is one, within the deadline. A server that was away is used again only when it has the weights
    that this client expects. Use it as an async context manager, or call `close()`.

    Args:
        servers: addresses such as `http://127.0.0.1:8000`; one, or several replicas.
        model: the name under which the servers serve it; None: what each request says.
        max_concurrency: how many requests are open at once, over all servers.
        timeout_s: the deadline of a request that names none.
        max_retries: how often a request is tried again.
        version: the number of the weights that the servers were started with.
    """

    def __init__(
        self,
        servers: Sequence[str] | str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_concurrency: int = 512,
        timeout_s: float = 600.0,
        max_retries: int = 8,
        backoff: Backoff | None = None,
        version: int = 0,
    ) -> None:
        urls = [servers] if isinstance(servers, str) else list(servers)
        urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        rules = (
            (bool(urls), "servers", urls, "at least one address"),
            (len(set(urls)) == len(urls), "servers", urls, "different addresses"),
            (
                all(u.startswith(("http://", "https://")) for u in urls),
                "servers",
                urls,
                "http(s) addresses such as http://127.0.0.1:8000",
            ),
            (max_concurrency >= 1, "max_concurrency", max_concurrency, ">= 1"),
            (timeout_s > 0, "timeout_s", timeout_s, "> 0"),
            (max_retries >= 0, "max_retries", max_retries, ">= 0"),
        )
        for ok, name, value, must in rules:
            if not ok:
                raise ConfigError(f"VLLMChatClient({name}={value!r}): must be {must}")
        self.replicas = tuple(Replica(url, version=version) for url in urls)
        self.model = model
        self.first_version = version
        self.retries = 0
        self.weight_sender: Callable[[Mapping[str, Any], int], Awaitable[Any]] | None = None
        self._version = version
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_concurrency = max_concurrency
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._backoff = backoff or Backoff(first_s=0.1, longest_s=5.0)
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._learning: dict[Replica, asyncio.Task[None]] = {}
        self._connection: _Connection | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"VLLMChatClient({[r.url for r in self.replicas]})"

    # Life

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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

    # The client contract

    @property
    def max_context_tokens(self) -> int | None:
        """The longest prompt plus completion; None until a server was asked."""
        known = [r.facts.max_model_len for r in self.replicas if r.facts is not None]
        return min((n for n in known if n is not None), default=None)

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        """Samples one completion; see `ChatClient`. Prompt log-probs, when asked for, are in
        `info["prompt_logprobs"]` (None first), at temperature 1."""
        if not request.prompt_token_ids:
            raise RequestRejectedError("the prompt is empty: give at least one token id")
        limit = self._timeout_s if request.timeout_s is None else request.timeout_s
        if not limit > 0:
            raise RequestRejectedError(f"timeout_s={limit}: must be more than 0")
        connection = await self._connect()
        failures: list[str] = []
        try:
            async with asyncio.timeout(limit), connection.slots:
                return await self._complete(request, failures)
        except TimeoutError as exc:
            if isinstance(exc, DeadlineError):
                raise
            last = f" (last failure: {failures[-1]})" if failures else ""
            raise DeadlineError("a completion", f"{self!r}{last}", limit) from exc

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        """Publishes `params` through the publisher that was made for this client."""
        if self.weight_sender is None:
            raise PublishError(
                "this client has no way to its servers' weights: make a "
                "BroadcastPolicyPublisher(client), which gives it one"
            )
        try:
            async with asyncio.timeout(timeout_s):
                await self.weight_sender(params, version)
        except TimeoutError as exc:
            if isinstance(exc, DeadlineError):
                raise
            raise DeadlineError(
                f"the publish of version {version}", repr(self), timeout_s or 0
            ) from exc
        return f"sent {len(params)} tensors to {len(self.in_rotation())} servers"

    async def get_policy_version(self) -> int:
        """The oldest version among the servers in rotation, as they say it."""
        await self._connect()
        found = [await self.replica_version(r) for r in self.in_rotation()]
        if not found:
            raise InferenceError(f"no server is in rotation: {self._states()}")
        return min(found)

    def stats(self) -> dict[str, float]:
        """What is going on now, for a log."""
        return {
            "replicas": float(len(self.replicas)),
            "replicas_in_rotation": float(len(self.in_rotation())),
            "in_flight": float(sum(r.in_flight for r in self.replicas)),
            "served": float(sum(r.served for r in self.replicas)),
            "retries": float(self.retries),
            "version": float(self._version),
        }

    # For publishers

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
    ) -> Any:
        """One exchange with a server's control routes, its status checked."""
        connection = await self._connect()
        # A connection of its own: a stale one would pass for a server that is gone.
        headers = {**self._headers, "Connection": "close"}
        url = replica.url + path
        return await ask(
            connection.session, method, url, body=body, timeout_s=timeout_s, headers=headers
        )

    async def relearn(self, replica: Replica, timeout_s: float) -> ServerFacts:
        """Asks a server anew what it is; it may have been restarted as another."""
        replica.facts = None
        await self._learn(replica, timeout_s)
        assert replica.facts is not None
        return replica.facts

    async def replica_version(self, replica: Replica, timeout_s: float = 10.0) -> int:
        """The version that a server says it has; what it was last brought to where it cannot."""
        if replica.facts is None:
            await self._learn(replica, timeout_s)
        if replica.facts is not None and replica.facts.names_versions:
            answer = await self.control(replica, "GET", "/weight_info", timeout_s=timeout_s)
            return version_number(answer["weight_version"], self.first_version)
        return replica.version

    # Inside

    async def _complete(self, request: TokenCompletionRequest, failures: list[str]) -> ChatResponse:
        failed: set[Replica] = set()
        for attempt in range(self._max_retries + 1):
            pause_s = 0.0
            replica = await self._choose(request.conversation_id, failed)
            if replica is not None:
                try:
                    return await self.ask_replica(replica, request)
                except UnreachableError as exc:
                    failures.append(str(exc))
                    failed.add(replica)
                    if exc.retry_after_s or not self._another(replica):
                        pause_s = self._backoff.pause_s(attempt, exc.retry_after_s)
            else:
                failures.append(f"no server is in rotation: {self._states()}")
                waited_for = [r.retry_at for r in self.replicas if r.out is None]
                if not waited_for:
                    break
                pause_s = max(0.0, min(waited_for) - time.monotonic())
            if attempt < self._max_retries:
                self.retries += 1
                await asyncio.sleep(pause_s)
        raise InferenceError(
            f"no server could serve the request in {len(failures)} tries; the last failure: "
            f"{failures[-1]}. {self._states()}"
        )

    async def ask_replica(self, replica: Replica, request: TokenCompletionRequest) -> ChatResponse:
        connection = await self._connect()
        facts = replica.facts
        assert facts is not None
        room = self._room(request, facts)
        version = replica.version
        make, path = (
            (generate_body, "/inference/v1/generate")
            if facts.generates
            else (completions_body, "/v1/completions")
        )
        body = make(request, room, f"ludic-v{self._version}")
        body["model"] = self.model or request.model
        replica.in_flight += 1
        try:
            answer = await ask(
                connection.session, "POST", replica.url + path, body=body, headers=self._headers
            )
        except UnreachableError as exc:
            if exc.status in (None, 502, 503, 504):  # 500 and 429 are about this one request
                replica.mark_down(str(exc), self._backoff.pause_s(replica.failures))
            raise
        finally:
            replica.in_flight -= 1
        response = read_answer(answer, request, version=version, first_version=self.first_version)
        if response.finish_reason is FinishReason.ABORT:
            raise UnreachableError(f"{replica.url} aborted the request")
        replica.served += 1
        return response

    def _room(self, request: TokenCompletionRequest, facts: ServerFacts) -> int:
        length, limit = len(request.prompt_token_ids), facts.max_model_len
        if limit is None:
            if request.sampling.max_tokens is None:
                raise RequestRejectedError(
                    "the server does not say how long a context it takes: set max_tokens"
                )
            return request.sampling.max_tokens
        if length >= limit:
            raise RequestRejectedError(
                f"a prompt of {length} tokens leaves no room for a completion within the server's "
                f"max_model_len of {limit}: shorten the prompt, or start it with a larger one"
            )
        return limit - length

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
            facts = await self.relearn(replica, timeout_s=10.0)
            if was_lost:
                found = await self.replica_version(replica)
                unsure = not facts.names_versions and self._version != self.first_version
                if found != self._version or unsure:
                    has = "unknown weights" if unsure else f"version {found}"
                    replica.out = (
                        f"it was away and came back with {has} instead of version "
                        f"{self._version}; the next publish brings it back"
                    )
            replica.mark_up()
        except (UnreachableError, DeadlineError) as exc:
            replica.mark_down(str(exc), self._backoff.pause_s(replica.failures))
        except (InferenceError, ConfigError) as exc:
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
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
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
