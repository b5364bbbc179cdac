"""A client's servers: what each one is, which weights it has, and which may serve."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self

from ludic.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    InferenceError,
    PublishError,
    RequestRejectedError,
)
from ludic.inference.http import Connections, UnreachableError, ask
from ludic.inference.retries import Backoff
from ludic.inference.vllm.flags import RECEIPT
from ludic.inference.vllm.switching import SWITCH
from ludic.inference.vllm.wire import version_number
from ludic.workers.deadlines import ended

_REMEMBERED_CONVERSATIONS = 65536
_PROBE_TEXT = "Tokenizers agree: 12 + 30 = 42, naïve café, <b>tags</b>\n\tand\n\nlines."


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server said about itself."""

    vllm_version: str
    models: tuple[str, ...]
    max_model_len: int | None
    generates: bool
    """It has `/inference/v1/generate`, and says which weights sampled each token."""
    updates: bool
    """It has the routes of a live weight update."""
    names_versions: bool
    """It keeps the name of its weights (`/weight_info`)."""
    loads_adapters: bool = False
    """It takes LoRA adapters while it serves (`/v1/load_lora_adapter`)."""
    switches: bool = False
    """It goes over to staged weights by itself (`ludic.inference.vllm.switching`)."""


@dataclass(eq=False)
class Serving:
    """What requests are sampled from: a server's own weights, or an adapter on top of them."""

    adapter: str | None = None
    """The name that requests give for it; None: the server's own weights."""
    version: int = 0
    """The adapter's version."""
    requests: int = 0
    """How many are running."""


@dataclass(eq=False)
class Replica:
    """One server's address and state. `version` is what it was last brought to by this process."""

    url: str
    facts: ServerFacts | None = None
    version: int = 0
    serving: Serving = field(default_factory=Serving)
    """What new requests are sampled from."""
    in_flight: int = 0
    served: int = 0
    retry_at: float = 0.0
    failures: int = 0
    out: str | None = None
    """Why it is out of rotation; None while it serves."""
    lost: str | None = None
    """How it was unreachable since its weights were last checked; None: it was not."""
    instance: str = ""
    """Which start of the server this is, where its registration says so."""

    def mark_down(self, cause: str, pause_s: float) -> None:
        """Notes that the server did not answer; it is asked again after a pause."""
        self.failures += 1
        self.lost = cause
        self.retry_at = time.monotonic() + pause_s

    def mark_up(self) -> None:
        self.failures, self.lost = 0, None

    def describe(self) -> str:
        if self.out is not None:
            return f"{self.url}: out of rotation ({self.out})"
        if self.lost is not None:
            return f"{self.url}: down ({self.lost})"
        return f"{self.url}: up, {self.in_flight} requests"


async def server_facts(url: str, ask: Callable[..., Awaitable[Any]]) -> ServerFacts:
    """Asks the server at `url` what it is and what it can; `ask` is called with a method and a
    path. Raises `ConfigError` for one that is not vLLM."""

    async def generates() -> bool:
        """Without --enable-scale-out the route refuses everything; with it, an empty body."""
        try:
            await ask("POST", "/inference/v1/generate", body={})
        except RequestRejectedError as exc:
            return "HTTP 403" not in str(exc)
        return True

    async def switches() -> bool:
        try:
            await ask("GET", SWITCH)
        except (InferenceError, ValueError):
            return False
        return True

    try:
        served = await ask("GET", "/v1/models")
        version = (await ask("GET", "/version")).get("version", "unknown")
        paths = set((await ask("GET", "/openapi.json")).get("paths", {}))
        models = tuple(str(m["id"]) for m in served["data"])
    except (UnreachableError, EngineClosedError):
        raise
    except (InferenceError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(
            f"{url} does not answer like a vLLM server ({exc}): is the address right? Start one "
            "with `python -m ludic.inference.vllm_server --model …`"
        ) from exc
    lengths = [m.get("max_model_len") for m in served["data"] if m.get("max_model_len")]
    names_versions = "/weight_info" in paths
    return ServerFacts(
        vllm_version=str(version),
        models=models,
        max_model_len=min(lengths, default=None),
        # Older servers have the route too, but say nothing of versions and are slower there.
        generates=names_versions and "/inference/v1/generate" in paths and await generates(),
        updates="/finish_weight_update" in paths,
        names_versions=names_versions,
        loads_adapters="/v1/load_lora_adapter" in paths,
        switches=await switches(),
    )


class WeightKeeper(Protocol):
    """Who keeps the servers' weights: a publisher, which tells its client of itself."""

    async def publish(self, weights: Mapping[str, Any], version: int) -> object:
        """Brings these weights to every server."""

    async def restore(self, replica: Replica) -> bool:
        """Brings a server that was away up to date; False: that takes a publish."""


class Rotation:
    """Servers that hold the same model. One that was away is used again only when it has the
    weights that are expected. All of it happens in one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None,
        headers: Mapping[str, str] | None,
        max_concurrency: int,
        connect_timeout_s: float,
        backoff: Backoff,
        version: int,
    ) -> None:
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
        self._headers, self._backoff = headers, backoff
        self._connections = Connections(repr(self), max_concurrency, connect_timeout_s)
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._learning: dict[Replica, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[r.url for r in self.replicas]})"

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()  # nobody else will: `__aexit__` is not called
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self, *, tokenizer: Any = None, timeout_s: float = 120.0) -> None:
        """Asks the servers what they are, once; each answer may take `timeout_s`, as a busy server
        may need half a minute for the list of its routes. Raises when none answers, when one serves
        another model, or when `tokenizer` does not spell text as the servers do."""
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
        tasks = [asyncio.ensure_future(self.illness(r, timeout_s)) for r in self.replicas]
        try:
            for illness in asyncio.as_completed(tasks):
                if await illness is None:
                    return True
            return False
        finally:
            await ended(*tasks)

    async def illness(
        self, replica: Replica, timeout_s: float
    ) -> UnreachableError | DeadlineError | None:
        """Why the server is not healthy; None if it is."""
        try:
            await self.control(replica, "GET", "/health", timeout_s=timeout_s, plain=True)
        except (UnreachableError, DeadlineError) as exc:
            return exc
        except InferenceError:  # a refusal is an answer
            pass
        return None

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
                brought_to = None
                while brought_to != replica.version:
                    brought_to = replica.version
                    reported = await self.replica_version(replica)
                expected = max(self.version, replica.version)
                if self.keeper is None:
                    # Versions advance without this client, and go back when a trainer resumes. All
                    # that is certain: weights that a server was started with are no trainer's.
                    published = self.registered or expected != self.first_version
                    if published and reported == self.first_version:
                        cause = "it still has the weights that it was started with"
                        replica.mark_down(cause, self._backoff.pause_s(replica.failures))
                        return
                elif reported != expected:
                    replica.out = (
                        f"it was away and came back with version {reported} instead of version "
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
