"""One server during one publish, of weights or of an adapter."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from ludic.distributed.vllm.timing import PublishTimes
from ludic.errors import DeadlineError, InferenceError, LudicError, PublishError
from ludic.inference.http import UnreachableError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.replica import Replica

PATIENCE_S = 10.0


class ServerUpdate(ABC):
    """Tells one server what to do, step by step, and remembers how far it came.

    A server that no longer answers is lost, and so is one that was out of rotation and refuses:
    neither keeps the others from being updated. Any other refusal is raised. All of it happens in
    one event loop; two servers' steps run side by side, two steps of one server never do.
    """

    def __init__(
        self, client: VLLMChatClient, replica: Replica, timeout_s: float, patience_s: float
    ) -> None:
        self.client, self.replica = client, replica
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self.was_out = replica.out
        self.lost = False
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
                    await self.client.relearn(replica, self.patience_s)
                await self.examine()
        except (UnreachableError, DeadlineError) as exc:
            self.lose(f"it did not answer when a publish began: {exc}")
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
        self._asked = (what, _now()) if asks else None
        try:
            with self.times.timed(name):
                await work()
        except LudicError as exc:
            if isinstance(exc, UnreachableError) and exc.status is None:
                self.lose(f"it went away when it was to {what}: {exc}")
            elif self.was_out is not None:
                self.lose(f"it was to be brought back, and did not {what}: {exc}")
            elif isinstance(exc, InferenceError):
                raise await self.explained(what, exc) from exc
            else:
                raise
        self._asked = None  # not so where the step was cancelled: see `lose_if_hung`

    @property
    def model_name(self) -> str:
        """The name under which the server serves the model."""
        facts = self.replica.facts
        return self.client.model or (facts.models[0] if facts is not None else "")

    async def explained(self, what: str, refusal: InferenceError) -> LudicError:
        """The error that a refusal is raised as."""
        return PublishError(f"{self.replica.url} did not {what}: {refusal}")

    def lose(self, why: str) -> None:
        """Takes the server out of rotation: nobody can say which weights it has."""
        self.lost = True
        self.replica.out = why

    def lose_if_hung(self) -> None:
        """For when the deadline has passed: loses the server if that is what was waited for, and
        it was not asked only a moment ago."""
        if self._asked is None or self.lost:
            return
        what, since = self._asked
        waited = _now() - since
        if waited >= self.patience_s:
            self.lose(f"it was to {what}, and had not answered after {waited:.3g} s")

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
        return await self.client.control(
            self.replica, method, path, body=body, timeout_s=limit, plain=plain
        )

    async def call_workers(self, method: str, seconds: float | None = None) -> list[Any]:
        """What each worker returns from a method of the worker extension."""
        return list((await self.ask("/collective_rpc", {"method": method}, seconds))["results"])


def _now() -> float:
    return asyncio.get_running_loop().time()
