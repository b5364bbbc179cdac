"""`VLLMChatClient`: samples from one or more vLLM servers, token ids in and out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import ConfigError, InferenceError, PublishError, RequestRejectedError
from ludic.inference.addresses import split_user, without_user
from ludic.inference.client import TokenCompletionRequest, completion_room
from ludic.inference.http import UnreachableError, ask
from ludic.inference.retries import Backoff, within
from ludic.inference.vllm.rotation import Replica, Rotation, Serving
from ludic.inference.vllm.wire import completions_body, generate_body, read_answer
from ludic.types import ChatResponse, FinishReason

_JOIN_S = 0.2


class VLLMChatClient(Rotation):
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
        connect_timeout_s: how long a server may take to accept a connection; one that takes
            longer counts as away.
        max_retries: how often a request is tried again.
        version: the number of the weights that the servers were started with.
        max_context_tokens: the longest prompt plus completion, where the servers take a longer one.
    """

    def __init__(
        self,
        servers: Sequence[str] | str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_concurrency: int = 512,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        max_retries: int = 8,
        backoff: Backoff | None = None,
        version: int = 0,
        max_context_tokens: int | None = None,
    ) -> None:
        urls = [servers] if isinstance(servers, str) else list(servers)
        users = [split_user(url)[1] for url in urls]
        urls = [without_user(url).rstrip("/").removesuffix("/v1") for url in urls]
        are_urls = all(u.startswith(("http://", "https://")) for u in urls)
        rules = (
            (bool(urls), "servers", urls, "at least one address"),
            (len(set(urls)) == len(urls), "servers", urls, "different addresses"),
            (are_urls, "servers", urls, "http(s) addresses such as http://127.0.0.1:8000"),
            (all(u == users[0] for u in users), "servers", urls, "of one user and password"),
            (max_concurrency >= 1, "max_concurrency", max_concurrency, ">= 1"),
            (timeout_s > 0, "timeout_s", timeout_s, "> 0"),
            (connect_timeout_s > 0, "connect_timeout_s", connect_timeout_s, "> 0"),
            (max_retries >= 0, "max_retries", max_retries, ">= 0"),
        )
        for ok, name, value, must in rules:
            if not ok:
                raise ConfigError(f"VLLMChatClient({name}={value!r}): must be {must}")
        super().__init__(
            urls,
            model=model,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else users[0],
            max_concurrency=max_concurrency,
            connect_timeout_s=connect_timeout_s,
            backoff=backoff or Backoff(first_s=0.1, longest_s=5.0),
            version=version,
        )
        self.retries = 0
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._longest = max_context_tokens

    @property
    def max_context_tokens(self) -> int | None:
        """The longest prompt plus completion; None until a server was asked."""
        lengths = [r.facts.max_model_len for r in self.replicas if r.facts is not None]
        return min((n for n in (*lengths, self._longest) if n is not None), default=None)

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        """Samples one completion; see `ChatClient`. Prompt log-probs, when asked for, are in
        `info["prompt_logprobs"]` (None first), at temperature 1."""
        limit = self._timeout_s if request.timeout_s is None else request.timeout_s
        if not limit > 0:
            raise RequestRejectedError(f"timeout_s={limit}: must be more than 0")
        completion_room(request.prompt_token_ids, None, "")  # an empty one needs no server
        connection = await self._connections.get()
        failures: list[str] = []

        def whom() -> str:
            return f"{self!r} (last failure: {failures[-1]})" if failures else repr(self)

        async with within(limit, "a completion", whom), connection.slots:
            return await self._complete(request, failures)

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        """Hands `params` to the publisher that was made for this client."""
        if self.keeper is None:
            raise PublishError(
                "this client cannot reach its servers' weights: make a "
                "BroadcastPolicyPublisher(client), which gives it one"
            )
        async with within(timeout_s, f"the publish of version {version}", repr(self)):
            await self.keeper.publish(params, version)
        return f"sent {len(params)} tensors to {len(self.in_rotation())} servers"

    async def get_policy_version(self) -> int:
        """The oldest version among the servers in rotation, as they say it."""
        versions = [await self.replica_version(r) for r in self.in_rotation()]
        if not versions:
            raise InferenceError(f"no server is in rotation: {self._states()}")
        return min(versions)

    async def _complete(self, request: TokenCompletionRequest, failures: list[str]) -> ChatResponse:
        failed: set[Replica] = set()
        for attempt in range(self._max_retries + 1):
            pause_s = 0.0
            replica = await self._choose(request.conversation_id, failed)
            while replica is None and self.registered:  # one may come, until the request's deadline
                failures[:] = [f"no server is in rotation: {self._states() or 'there is none'}"]
                await asyncio.sleep(_JOIN_S)
                replica = await self._choose(request.conversation_id, failed)
            if replica is not None:
                try:
                    return await self.ask_replica(replica, request, pooled=True)
                except UnreachableError as exc:
                    failures.append(str(exc))
                    failed.add(replica)
                    if exc.retry_after_s or self.in_rotation() in ([], [replica]):
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

    async def ask_replica(
        self,
        replica: Replica,
        request: TokenCompletionRequest,
        serving: Serving | None = None,
        *,
        pooled: bool = False,
    ) -> ChatResponse:
        """One try on one server; `serving`: of something else than it serves now. `pooled`: over a
        connection that the server may close at the same moment, for those who can try again."""
        connection = await self._connections.get()
        session = connection.session if pooled else connection.unpooled
        facts = replica.facts
        assert facts is not None
        limit, setting = facts.max_model_len, "the server's max_model_len"
        if self._longest is not None and (limit is None or self._longest < limit):
            limit, setting = self._longest, "max_context_tokens"
        room = completion_room(request.prompt_token_ids, limit, setting)
        if (room := room or request.sampling.max_tokens) is None:
            raise RequestRejectedError(
                "the server does not say how long a context it takes: set max_tokens"
            )
        serving = serving or replica.serving
        adapter = serving.adapter
        version = replica.version if adapter is None else serving.version
        if adapter is not None and request.returns.prompt_logprobs:
            raise RequestRejectedError(
                "prompt log-probs can end the engine of a server with adapters (vLLM 0.32, CPU): "
                "score with the trainer's module, or on a server without adapters"
            )
        make, path = (
            (generate_body, "/inference/v1/generate")
            if facts.generates
            else (completions_body, "/v1/completions")
        )
        body = make(request, room, f"ludic-v{self.version}")
        body["model"] = adapter or self.model or request.model
        replica.in_flight += 1
        serving.requests += 1
        try:
            answer = await ask(
                session, "POST", replica.url + path, body=body, headers=self._headers
            )
        except UnreachableError as exc:
            if exc.status in (None, 502, 503, 504):  # 500 and 429 are about this one request
                replica.mark_down(str(exc), self._backoff.pause_s(replica.failures))
            raise
        except RequestRejectedError as exc:
            if adapter is None or "HTTP 404" not in str(exc):
                raise
            # It was restarted between two requests.
            replica.mark_down(f"it no longer has the adapter {adapter}", 0.0)
            raise UnreachableError(str(exc)) from exc
        finally:
            replica.in_flight -= 1
            serving.requests -= 1
        versions = {"version": version, "first_version": self.first_version}
        response = read_answer(answer, request, **versions, adapter=adapter is not None)
        if response.finish_reason is FinishReason.ABORT:
            raise UnreachableError(f"{replica.url} aborted the request")
        if self.keeper is None and response.trace is not None:
            self.version = max([self.version, *(s.version for s in response.trace.version_spans)])
        replica.served += 1
        return response
