"""`VLLMChatClient`: samples from one or more vLLM servers, token ids in and out."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from ludic.errors import (
    ConfigError,
    DeadlineError,
    InferenceError,
    PublishError,
    RequestRejectedError,
)
from ludic.inference.addresses import split_user, without_user
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.http import Connections, UnreachableError, ask
from ludic.inference.retries import Backoff, within
from ludic.inference.vllm.flags import RECEIPT
from ludic.inference.vllm.servers import Replica, ServerFacts, Serving, WeightKeeper, server_facts
from ludic.inference.vllm.wire import completions_body, generate_body, read_answer, version_number
from ludic.types import ChatResponse, FinishReason

_REMEMBERED_CONVERSATIONS = 65536
_JOIN_S = 0.2
_PROBE_TEXT = "Tokenizers agree: 12 + 30 = 42, naïve café, <b>tags</b>\n\tand\n\nlines."


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
        connect_timeout_s: how long a server may take to accept a connection; one that takes
            longer counts as away.
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
        connect_timeout_s: float = 10.0,
        max_retries: int = 8,
        backoff: Backoff | None = None,
        version: int = 0,
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
        self.replicas: tuple[Replica, ...] = tuple(
            Replica(url, None, version, Serving(version=version)) for url in urls
        )
        self.model, self.first_version = model, version
        self.keeper: WeightKeeper | None = None
        self.registered = False
        """Whether servers come and go, as `set_servers` says."""
        self.version = version
        """What servers must have to be used after they were away; without a publisher, the newest
        that any of them was seen with."""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else users[0]
        self._backoff = backoff or Backoff(first_s=0.1, longest_s=5.0)
        self._connections = Connections(repr(self), max_concurrency, connect_timeout_s)
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._learning: dict[Replica, asyncio.Task[None]] = {}
        self.retries = 0
        self._timeout_s = timeout_s
        self._max_retries = max_retries

    def __repr__(self) -> str:
        return f"VLLMChatClient({[r.url for r in self.replicas]})"

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()  # nobody else will: `__aexit__` is not called
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self, *, tokenizer: Any = None, timeout_s: float = 30.0) -> None:
        """Asks the servers what they are, once. Raises when none answers, when one serves another
        model, or when `tokenizer` does not spell text as the servers do."""
        results = await asyncio.gather(
            *(self.learn(r, timeout_s) for r in self.replicas if r.facts is None),
            return_exceptions=True,
        )
        for result in results:
            away = isinstance(result, UnreachableError | DeadlineError)
            if isinstance(result, BaseException) and not away:
                raise result
        answering = [r for r in self.replicas if r.facts is not None]
        if not answering:
            raise InferenceError(f"no vLLM server answers: {self._states()}. Are they up?")
        for replica in answering if tokenizer is not None else ():
            await self._check_spelling(replica, tokenizer, timeout_s)

    async def close(self) -> None:
        """Closes the connections; requests after that are refused."""
        for task in list(self._learning.values()):
            task.cancel()
        await self._connections.close()

    # The client contract

    @property
    def max_context_tokens(self) -> int | None:
        """The longest prompt plus completion; None until a server was asked."""
        lengths = [r.facts.max_model_len for r in self.replicas if r.facts is not None]
        return min((n for n in lengths if n is not None), default=None)

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        """Samples one completion; see `ChatClient`. Prompt log-probs, when asked for, are in
        `info["prompt_logprobs"]` (None first), at temperature 1."""
        if not request.prompt_token_ids:
            raise RequestRejectedError("the prompt is empty: give at least one token id")
        limit = self._timeout_s if request.timeout_s is None else request.timeout_s
        if not limit > 0:
            raise RequestRejectedError(f"timeout_s={limit}: must be more than 0")
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

    # What they are

    def set_servers(self, servers: Mapping[str, str], *, joining: str | None = None) -> bool:
        """Uses these servers from now on: addresses, each with the name of its start, since one
        that was started again is another. Requests that are open elsewhere go on. `joining` is why
        new ones are out of rotation until the next publish; None: they, and those that were out,
        serve once they are found to have a trainer's weights. Returns whether any came or left."""

        def replica_of(url: str, instance: str) -> Replica:
            for replica in self.replicas:
                same = replica.url == url and replica.instance in ("", instance)
                if same and (joining is not None or replica.out is None):
                    replica.instance = instance
                    return replica
            fresh = Serving(version=self.first_version)
            new = Replica(url, None, self.first_version, fresh, out=joining, instance=instance)
            new.lost = None if joining else "it is new here"
            return new

        before, self.registered = set(self.replicas), True
        self.replicas = tuple(replica_of(*server) for server in servers.items())
        return set(self.replicas) != before

    def in_rotation(self) -> list[Replica]:
        """The servers that requests may go to."""
        return [r for r in self.replicas if r.out is None and r.lost is None]

    async def any_answers(self, timeout_s: float = 10.0) -> bool:
        """Whether a server is there, in rotation or not."""
        asked = [
            asyncio.ensure_future(self.control(r, "GET", "/health", timeout_s=timeout_s))
            for r in self.replicas
        ]
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    await answer
                except (UnreachableError, DeadlineError):
                    continue
                except InferenceError:  # a refusal is an answer
                    pass
                return True
            return False
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

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
        """One exchange with a server's control routes, over a new connection."""
        session = (await self._connections.get()).unpooled
        url, headers = replica.url + path, self._headers
        return await ask(
            session, method, url, body=body, timeout_s=timeout_s, headers=headers, plain=plain
        )

    async def replica_version(self, replica: Replica, timeout_s: float = 10.0) -> int:
        """The version that a server says it has. One that keeps none has what it was last brought
        to, unless it was restarted since."""
        if replica.facts is None:
            await self.learn(replica, timeout_s)
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
        body = {"method": RECEIPT}
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

    def _revive(self, replica: Replica) -> asyncio.Task[None]:
        """Finds out, once for all callers, whether a server that was away may serve again."""
        task = self._learning.get(replica)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.create_task(self._welcome(replica))
            self._learning[replica] = task
            task.add_done_callback(lambda _: self._learning.pop(replica, None))
        return task

    async def _welcome(self, replica: Replica) -> None:
        was_lost = replica.lost is not None
        try:
            await self.learn(replica, timeout_s=10.0)
            if was_lost and not (self.keeper and await self.keeper.restore(replica)):
                # A publish may run meanwhile. What the server said before an update reached it
                # does not count afterwards; and then it may be ahead of what is expected of all.
                had = None
                while had != replica.version:
                    had = replica.version
                    has = await self.replica_version(replica)
                expected = max(self.version, replica.version)
                if self.keeper is None:
                    # Versions go on without us, and back with a trainer that resumes: all that is
                    # sure is that weights which a server was started with are no trainer's.
                    published = self.registered or expected != self.first_version
                    if published and has == self.first_version:
                        cause = "it still has the weights that it was started with"
                        replica.mark_down(cause, self._backoff.pause_s(replica.failures))
                        return
                elif has != expected:
                    replica.out = (
                        f"it was away and came back with version {has} instead of version "
                        f"{expected}; the next publish brings it back"
                    )
            replica.mark_up()
        except (UnreachableError, DeadlineError) as exc:
            replica.mark_down(str(exc), self._backoff.pause_s(replica.failures))
        except (InferenceError, ConfigError, PublishError) as exc:
            replica.out = str(exc)

    async def _check_spelling(self, replica: Replica, tokenizer: Any, timeout_s: float) -> None:
        assert replica.facts is not None
        name = self.model or replica.facts.models[0]
        body = {"model": name, "prompt": _PROBE_TEXT, "add_special_tokens": False}
        answer = await self.control(replica, "POST", "/tokenize", body=body, timeout_s=timeout_s)
        theirs = list(answer["tokens"])
        ours = list(tokenizer.encode(_PROBE_TEXT, add_special_tokens=False))
        if theirs != ours:
            raise ConfigError(
                f"the tokenizer does not fit {replica.url}: a probe text is {len(ours)} tokens "
                f"{ours[:8]}… here and {len(theirs)} tokens {theirs[:8]}… there. Load the "
                "tokenizer of the model that the server serves"
            )

    async def learn(self, replica: Replica, timeout_s: float) -> None:
        """Asks a server what it is; it may have been restarted as another."""
        replica.facts = None
        ask_it = partial(self.control, replica, timeout_s=timeout_s)
        try:
            facts = await server_facts(replica.url, ask_it)
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

    # Inside

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
        room = self._room(request, facts)
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
        response = read_answer(
            answer,
            request,
            version=version,
            first_version=self.first_version,
            adapter=adapter is not None,
        )
        if response.finish_reason is FinishReason.ABORT:
            raise UnreachableError(f"{replica.url} aborted the request")
        if self.keeper is None and response.trace is not None:
            self.version = max([self.version, *(s.version for s in response.trace.version_spans)])
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
