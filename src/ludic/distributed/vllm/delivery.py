"""One publish in progress: its steps, the servers during it, and how long its parts took.

This is common to whole weights and adapters; `Delivery` and `Payload` define where they differ.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from ludic.distributed.interfaces import Weights
from ludic.distributed.vllm.canary import Canary
from ludic.errors import DeadlineError, InferenceError, LudicError, PublishError
from ludic.inference.http import UnreachableError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.rotation import Replica
from ludic.workers.deadlines import ended

T = TypeVar("T")

ORDER = (
    *("gather", "encode", "prepare", "greet", "finite", "checksums", "own_canary", "join"),
    *("write", "room", "load", "stage", "compare", "sample"),
    *("pause", "apply", "reset", "resume", "keep", "canary"),
    *("worker_stage", "worker_checksums"),
)


HEALTHY_S = 5.0
"""How long a server that answered with HTTP 5xx has to stay healthy to count as alive, and how long
one may take to answer before it is asked for its health."""


class PublishTimes:
    """Seconds by the name of a stage. Stages may overlap, so they need not add up. Threads may time
    stages too, each its own ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds what its body takes, even when that raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def slowest(self, others: Iterable[Mapping[str, float]], prefix: str = "") -> None:
        """Takes over the stages of those who worked side by side: of each, the longest."""
        for seconds in others:
            for name, took in seconds.items():
                key = prefix + name
                self.seconds[key] = max(self.seconds.get(key, 0.0), took)

    def in_order(self) -> dict[str, float]:
        """The stages in the order in which they begin, those of the workers last."""
        places = {name: place for place, name in enumerate(ORDER)}
        return dict(sorted(self.seconds.items(), key=lambda s: places.get(s[0], len(ORDER))))


async def together(steps: Iterable[Coroutine[Any, Any, Any] | asyncio.Future[Any]]) -> None:
    """Runs the steps side by side; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await ended(*tasks)


class ServersAwayError(PublishError):
    """All servers went away during a publish; none of them refused it."""


class ServerUpdate(ABC):
    """Tells one server what to do, step by step, and remembers how far it came.

    A server that no longer answers, or whose engine is dead, is lost, and so is one that was out of
    rotation and refuses: none of them keeps the others from being updated. Any other refusal is
    raised. All of it happens in one event loop; two servers' steps run side by side, two steps of
    one server never do.
    """

    def __init__(
        self, client: VLLMChatClient, replica: Replica, timeout_s: float, patience_s: float
    ) -> None:
        self.client, self.replica = client, replica
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self.was_out = replica.out
        self.lost = self.away = False
        self.times = PublishTimes()
        self._asked: tuple[str, float] | None = None
        """What it was asked for and has not answered, and since when."""

    @abstractmethod
    async def examine(self) -> None:
        """Raises unless the server can be updated; its facts are known."""

    async def greet(self) -> None:
        """Finds out whether the server is there and can be updated."""
        replica = self.replica
        try:
            with self.times.timed("greet"):
                # One that was away may be another by now.
                if replica.facts is None or replica.lost or replica.out is not None:
                    await self.client.learn(replica, self.patience_s)
                await self.examine()
        except (UnreachableError, DeadlineError) as exc:
            why = f"it did not answer when a publish began: {exc}"
            self.lose(why, away=await self.is_away(exc))
        except LudicError as exc:
            if self.was_out is None:
                raise
            self.lose(str(exc))

    async def step(
        self, name: str, what: str, work: Callable[[], Awaitable[Any]], *, asks: bool = True
    ) -> None:
        """Does one step unless the server is lost. `asks`: the step waits for the server's answer,
        and for nobody else."""
        if self.lost:
            return
        self._asked = (what, now()) if asks else None
        try:
            with self.times.timed(name):
                await work()
        except LudicError as exc:
            if isinstance(exc, UnreachableError) and await self.is_away(exc):
                self.lose(f"it went away when it was to {what}: {exc}", away=True)
            elif self.was_out is not None:
                self.lose(f"it was to be brought back, and did not {what}: {exc}")
            elif isinstance(exc, InferenceError):
                raise await self.explained(what, exc) from exc
            else:
                raise
        self._asked = None  # not so where the step was cancelled: see `lose_if_hung`

    async def is_away(self, exc: BaseException) -> bool:
        """Whether a failure is that of a server that does not answer, or is about to end.

        One that was killed may answer for a moment longer, with errors, and even call itself
        healthy. So a server that answered with HTTP 5xx is alive only if it stays healthy."""
        if isinstance(exc, DeadlineError):
            return True
        if not isinstance(exc, UnreachableError) or (exc.status or 500) < 500:
            return False
        limit_s = min(HEALTHY_S, self.patience_s / 2)  # the last question may take as long again
        ends_at = now() + limit_s
        while exc.status is not None and now() < ends_at:
            if await self.client.illness(self.replica, limit_s) is not None:
                return True
            await asyncio.sleep(limit_s / 5)
        return exc.status is None

    async def _until_ill(self) -> UnreachableError | DeadlineError:
        """Returns when the server is gone, its engine dead, or nobody there to say so. Asks each
        time after as long as it has waited already."""
        pause_s = min(HEALTHY_S, self.patience_s)
        while True:
            await asyncio.sleep(pause_s)
            illness = await self.client.illness(self.replica, self.patience_s)
            if isinstance(illness, DeadlineError):  # it may be this process that was busy
                illness = await self.client.illness(self.replica, self.patience_s)
            if illness is not None:
                return illness
            pause_s *= 2

    @property
    def model_name(self) -> str:
        """The name under which the server serves the model."""
        facts = self.replica.facts
        return self.client.model or (facts.models[0] if facts is not None else "")

    async def explained(self, what: str, refusal: InferenceError) -> LudicError:
        """The error that a refusal is raised as."""
        return PublishError(f"{self.replica.url} did not {what}: {refusal}")

    def lose(self, why: str, *, away: bool = False) -> None:
        """Takes the server out of rotation: nobody can say which weights it has. `away`: it does
        not answer."""
        self.lost, self.away = True, away
        self.replica.out = why

    def lose_if_hung(self) -> None:
        """For when the deadline has passed: loses the server if that is what was waited for, and
        it was not asked only a moment ago."""
        if self._asked is None or self.lost:
            return
        what, since = self._asked
        waited = now() - since
        if waited >= self.patience_s:
            self.lose(f"it was to {what}, and had not answered after {waited:.3g} s", away=True)

    async def ask(
        self,
        path: str,
        body: Any = None,
        seconds: float | None = None,
        *,
        method: str = "POST",
        plain: bool = False,
    ) -> Any:
        """One exchange over the server's control routes."""
        limit = self.timeout_s if seconds is None else seconds
        exchange = self.client.control(
            self.replica, method, path, body=body, timeout_s=limit, plain=plain
        )
        return await self.watched(path, exchange)

    async def watched(self, what: str, exchange: Coroutine[Any, Any, T]) -> T:
        """The server's answer. vLLM never gives one where its engine was killed meanwhile: so this
        fails, too, when the server is no longer healthy."""
        asking, watching = asyncio.ensure_future(exchange), asyncio.ensure_future(self._until_ill())
        try:
            await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise UnreachableError(f"{what} was not answered, and then {watching.result()}")
        finally:
            await ended(asking, watching)

    async def call_workers(
        self, method: str, seconds: float | None = None, *args: Any
    ) -> list[Any]:
        """What each worker returns from a method of the worker extension."""
        body = {"method": method, "args": args}
        return list((await self.ask("/collective_rpc", body, seconds))["results"])


def now() -> float:
    """The time by the clock of the event loop."""
    return asyncio.get_running_loop().time()


Server = TypeVar("Server", bound=ServerUpdate)


@dataclass(frozen=True, slots=True)
class Job:
    """One publish: what, under which version, to whom, and within which limits. `model` is the one
    that scores the canary; None: there is no canary."""

    client: VLLMChatClient
    tensors: Mapping[str, Tensor]
    version: int
    model: nn.Module | None
    canary: Canary
    times: PublishTimes
    timeout_s: float
    patience_s: float
    ends_at: float
    """When its deadline passes, by the clock of the event loop."""


class Delivery(ABC, Generic[Server]):
    """One publish on its way: `stage`, then `use`; or `undo` where `stage` failed. Always `close`.

    `servers` are those that are still part of it.
    """

    verified = True

    def __init__(self, job: Job, servers: list[Server]) -> None:
        self.job, self.servers = job, servers

    @property
    def sent(self) -> Mapping[str, Tensor]:
        """What travelled."""
        return self.job.tensors

    async def each(self, step: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Has the servers do a step side by side, and goes on with those that are left."""
        await together(step(server) for server in self.servers)
        self.drop_lost()

    def drop_lost(self) -> None:
        """Goes on without servers that are lost; raises where none is left."""
        remaining = [server for server in self.servers if not server.lost]
        if not remaining:
            why = "; ".join(server.replica.describe() for server in self.servers)
            kind = ServersAwayError if all(s.away for s in self.servers) else PublishError
            raise kind(f"no server is left for version {self.job.version}: {why}")
        self.servers = remaining

    @abstractmethod
    async def stage(self) -> None:
        """Everything before a token can be sampled from the new version, checks included."""

    @abstractmethod
    async def use(self) -> None:
        """Lets the servers sample from the new version. One that fails here is lost."""

    @abstractmethod
    async def undo(self, *, late: bool) -> None:
        """Has the servers forget what was staged. `late`: the deadline has passed."""

    async def check(self) -> None:
        """What can be checked only when the new version is in use."""

    async def close(self) -> None:
        """Frees what was held for the publish."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """For the report."""


class Payload(ABC):
    """What a publisher brings to its servers. One per publisher: it may keep what later publishes
    need, and is used by one of them at a time."""

    restores = False
    """Whether a server that was away can be brought up to date between two publishes."""

    @abstractmethod
    def gather(self, weights: Weights) -> dict[str, Tensor]:
        """The tensors to send. Called in a thread."""

    @abstractmethod
    def delivery(self, job: Job) -> Delivery[Any]:
        """Begins a publish."""

    async def restore(self, replica: Replica, patience_s: float) -> bool:
        """Brings a server that was away up to date; False: that takes a publish."""
        return False

    async def close(self) -> None:  # noqa: B027
        """Takes back what was published, where that can be done."""

    def state(self, replica: Replica) -> str:
        """How a server is, for an error."""
        return replica.describe()
