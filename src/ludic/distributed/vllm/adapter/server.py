"""One server in the course of one publish of an adapter: what it is told, and what it answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.vllm.adapter.folders import is_abandoned
from ludic.distributed.vllm.adapter.weights import PREFIX
from ludic.distributed.vllm.checksums import checksums
from ludic.distributed.vllm.server_update import CLEAN_UP_TIMEOUT_S
from ludic.errors import ConfigError, DeadlineError, InferenceError, LudicError, PublishError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.sampling import SamplingConfig
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.replica import Replica, Serving, UnreachableError
from ludic.types import TokenTrace

_OURS = re.compile(r"@\d+-[0-9a-f]{8}$")


@dataclass(frozen=True, slots=True)
class Release:
    """One version of the adapter, written where servers can read it."""

    name: str
    version: int
    folder: Path
    rank: int
    tensors: Mapping[str, Tensor]
    """As they lie in the folder."""


class AdapterServer:
    """Tells one server what to do, checks every answer, and remembers how far it is."""

    def __init__(
        self, client: VLLMChatClient, replica: Replica, timeout_s: float, assumed_loras: int
    ) -> None:
        self.client, self.replica = client, replica
        # One that hangs must leave the others time for the rest of a short publish.
        self.clean_up_s = min(CLEAN_UP_TIMEOUT_S, timeout_s / 4)
        self.was_out = replica.out is not None
        # Nobody waits long for one that serves nobody.
        self.timeout_s = self.clean_up_s if self.was_out else timeout_s
        self.max_loras = assumed_loras
        self.answers_receipts = False
        self.lost = False
        self.loaded: Serving | None = None
        self._asked: tuple[str, float] | None = None
        """What it was asked for and has not answered, and since when."""

    async def attempt(self, step: Awaitable[None]) -> None:
        """Does one step. Where the server was out of rotation before, a failure keeps it there and
        is nobody else's."""
        try:
            await step
        except LudicError as exc:
            if not self.was_out:
                raise
            self.lose(str(exc))

    async def greet(self, rank: int, mine: Path, known: set[str]) -> None:
        """Finds out whether the server is there; see `examine`."""
        replica = self.replica
        try:
            # One that was away may be another by now.
            if replica.facts is None or replica.lost or replica.out is not None:
                await self.client.relearn(replica, self.clean_up_s)
            await self.examine(rank, mine, known)
        except (UnreachableError, DeadlineError) as exc:
            self.lose(f"it did not answer when a publish began: {exc}")

    async def examine(self, rank: int, mine: Path, known: set[str]) -> None:
        """Raises `ConfigError` where the server cannot take an adapter of this rank. Unloads what
        publishers that are gone have left there, and what came from `mine` and is not `known`: an
        answer that got lost."""
        url, facts = self.replica.url, self.replica.facts
        start = f"start it with `ludic serve --max-lora-rank {rank}`"
        assert facts is not None
        if not facts.loads_adapters:
            raise ConfigError(
                f"{url} (vLLM {facts.vllm_version}) takes no adapters while it serves: {start}, "
                "which sets --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or publish merged"
            )
        limits = await self._limits()
        if limits is not None:
            if not limits["enabled"]:
                raise ConfigError(f"{url} was started without --enable-lora: {start}")
            if rank > limits["max_rank"]:
                raise ConfigError(
                    f"the adapter has rank {rank}, and {url} takes up to {limits['max_rank']} "
                    f"(--max-lora-rank): {start}, train a smaller one, or publish merged"
                )
            if limits["max_loras"] < 2:
                raise ConfigError(
                    f"{url} holds one adapter at a time, so there is no room for the next beside "
                    "it: start it with --max-loras 2 or more"
                )
            self.max_loras = limits["max_loras"]
            self.answers_receipts = True
        for name, folder in (await self.adapters()).items():
            lost_track = folder.parent == mine and name not in known
            if _OURS.search(name) and (lost_track or is_abandoned(folder.parent)):
                await self.unload(name)

    async def adapters(self) -> dict[str, Path]:
        """The adapters that requests to the server can name, with the folders they came from."""
        answer = await self._ask("GET", "/v1/models", seconds=self.clean_up_s)
        return {str(c["id"]): Path(str(c["root"])) for c in answer["data"] if c.get("parent")}

    async def load(self, release: Release) -> None:
        """Has the server read the adapter; requests do not use it yet."""
        if self.lost:
            return
        body = {"lora_name": release.name, "lora_path": str(release.folder)}
        try:
            with self._open("load the adapter"):
                await self._ask("POST", "/v1/load_lora_adapter", body, plain=True)
        except UnreachableError as exc:
            if exc.status is None:
                self.lose(f"it went away when it was to load an adapter: {exc}")
                return
            raise PublishError(f"{self.replica.url} refused the adapter: {exc}") from exc
        except InferenceError as exc:
            raise PublishError(
                f"{self.replica.url} refused the adapter: {exc}. A server on another machine needs "
                "a folder that both see: AdapterPolicyPublisher(folder=…)"
            ) from exc
        self.loaded = Serving(release.name, release.version)

    async def compare(self, release: Release) -> None:
        """Raises unless every worker holds every tensor, bit for bit as it was written."""
        if self.lost or not self.answers_receipts:
            return
        with self._open("say what it loaded"):
            answer = await self._call("ludic_adapter_receipt", self.timeout_s)
        for rank, receipt in enumerate(answer):
            arrived = receipt.get("tensors")
            if arrived is None or not receipt["active"]:
                why = receipt.get("error", "the adapter is not in use")
                raise PublishError(f"{self.replica.url}, worker {rank}, has no adapter: {why}")
            wrong = _differing(release.tensors, arrived)
            if wrong:
                raise PublishError(
                    f"{self.replica.url}, worker {rank}: {len(wrong)} of the adapter's tensors are "
                    f"not as they were sent, first {wrong[0]}"
                )

    async def sample(self, prompt: tuple[int, ...], tokens: int) -> TokenTrace | None:
        """A completion under the adapter that was loaded; None where the server went away.

        Sampled, where a scored prompt would do: servers whose output head can have an adapter end
        their engine over prompt log-probs (0.32, CPU), unless nothing else runs.
        """
        request = TokenCompletionRequest(
            self.client.model or "",
            prompt,
            SamplingConfig(max_tokens=tokens, seed=0),
            extensions={"ignore_eos": True},
        )
        try:
            with self._open("sample the canary"):
                async with asyncio.timeout(self.timeout_s):
                    response = await self.client.ask_replica(self.replica, request, self.loaded)
        except UnreachableError as exc:
            self.lose(f"it went away before the canary: {exc}")
            return None
        except TimeoutError as exc:
            raise DeadlineError("the canary", self.replica.url, self.timeout_s) from exc
        return response.trace

    def switch(self) -> Serving:
        """From here on, new requests name the adapter. Answers what they named before."""
        replica, loaded = self.replica, self.loaded
        assert loaded is not None
        before, replica.serving = replica.serving, loaded
        replica.version, replica.out = loaded.version, None
        replica.mark_up()
        return before

    async def unload(self, name: str) -> None:
        """Has the server forget the name. One that is gone has forgotten it already."""
        with suppress(InferenceError, DeadlineError):
            body = {"lora_name": name}
            await self._ask("POST", "/v1/unload_lora_adapter", body, self.clean_up_s, plain=True)

    def lose(self, why: str) -> None:
        """Takes the server out of rotation."""
        self.lost = True
        self.replica.out = why

    def lose_if_hung(self) -> None:
        """For when the deadline has passed: loses the server if it was that which was waited for,
        and not asked only a moment ago."""
        if self._asked is None:
            return
        what, since = self._asked
        waited = time.monotonic() - since
        if waited >= self.clean_up_s:
            self.lose(f"it was to {what}, and had not answered after {waited:.3g} s")

    @contextmanager
    def _open(self, what: str) -> Iterator[None]:
        self._asked = what, time.monotonic()
        yield  # a cancelled step stays open
        self._asked = None

    async def _limits(self) -> Mapping[str, Any] | None:
        """What the workers say that they take; None where they cannot be asked."""
        try:
            return (await self._call("ludic_adapter_limits", self.clean_up_s))[0]
        except UnreachableError as exc:
            if exc.status is None:
                raise
        except InferenceError:
            pass
        return None

    async def _call(self, method: str, seconds: float) -> list[Mapping[str, Any]]:
        answer = await self._ask("POST", "/collective_rpc", {"method": method}, seconds)
        return list(answer["results"])

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        seconds: float | None = None,
        plain: bool = False,
    ) -> Any:
        return await self.client.control(
            self.replica, method, path, body=body, timeout_s=seconds or self.timeout_s, plain=plain
        )


def _differing(sent: Mapping[str, Tensor], arrived: Mapping[str, list[Any]]) -> list[str]:
    """The tensors that are not there as they were sent, in the type that the server computes in."""
    named = {n.removeprefix(PREFIX).removesuffix(".weight"): t for n, t in sent.items()}
    if not arrived:
        return list(named)
    kind = str(next(iter(arrived.values()))[1])
    sums = checksums((n, t.to(getattr(torch, kind))) for n, t in named.items())
    expected = {n: [str(sums[n]), kind, list(t.shape)] for n, t in named.items()}
    if expected.keys() == arrived.keys():
        return [n for n, e in expected.items() if arrived[n] != e]
    # Some models have other names inside vLLM: then as many of each kind must be there.
    left = Counter(str(value) for value in arrived.values())
    wrong = []
    for name, value in expected.items():
        if left[str(value)]:
            left[str(value)] -= 1
        else:
            wrong.append(name)
    return wrong
