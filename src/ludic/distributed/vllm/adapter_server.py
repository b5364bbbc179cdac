"""One server during one publish of an adapter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.vllm.adapter_weights import PREFIX
from ludic.distributed.vllm.checksums import receipt as receipt_of
from ludic.distributed.vllm.delivery import ServerUpdate
from ludic.distributed.vllm.shared_memory import is_abandoned
from ludic.errors import (
    ConfigError,
    DeadlineError,
    InferenceError,
    PublishError,
    RequestRejectedError,
)
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.http import UnreachableError
from ludic.inference.retries import within
from ludic.inference.sampling import SamplingConfig
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import ADAPTER_LIMITS, ADAPTER_RECEIPT
from ludic.inference.vllm.servers import Replica, Serving
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


class AdapterServer(ServerUpdate):
    """Loads an adapter of the given rank, says what it holds, and samples from it when told to.

    `mine` is the publisher's folder, and `known` the adapters that the server should have of it.
    """

    def __init__(
        self,
        client: VLLMChatClient,
        replica: Replica,
        timeout_s: float,
        patience_s: float,
        assumed_loras: int,
        rank: int,
        mine: Path,
        known: set[str],
    ) -> None:
        # Nobody waits long for one that serves nobody.
        limit = timeout_s if replica.out is None else patience_s
        super().__init__(client, replica, limit, patience_s)
        self.max_loras, self._rank, self._mine, self._known = assumed_loras, rank, mine, known
        self.answers_receipts = False
        self.loaded: Serving | None = None

    async def examine(self) -> None:
        """Raises `ConfigError` where the server cannot take the adapter. Unloads what publishers
        that are gone have left there, and what came from `mine` and is not `known`: an answer that
        got lost."""
        url, facts, rank = self.replica.url, self.replica.facts, self._rank
        start = f"start it with `ludic serve --max-lora-rank {rank}`"
        assert facts is not None
        if not facts.loads_adapters:
            raise ConfigError(
                f"{url} (vLLM {facts.vllm_version}) cannot load adapters while it runs: {start}, "
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
            lost_track = folder.parent == self._mine and name not in self._known
            if _OURS.search(name) and (lost_track or is_abandoned(folder.parent)):
                await self.unload(name)

    async def adapters(self) -> dict[str, Path]:
        """The adapters that requests to the server can name, with the folders they came from."""
        answer = await self.ask("/v1/models", seconds=self.patience_s, method="GET")
        return {str(c["id"]): Path(str(c["root"])) for c in answer["data"] if c.get("parent")}

    async def load(self, release: Release) -> None:
        """Has the server read the adapter; requests do not use it yet."""
        body = {"lora_name": release.name, "lora_path": str(release.folder)}

        async def work() -> None:
            try:
                await self.ask("/v1/load_lora_adapter", body, plain=True)
            except RequestRejectedError as exc:
                raise PublishError(
                    f"{self.replica.url} did not load the adapter: {exc}. A server on another "
                    "machine needs a folder that both see: AdapterPolicyPublisher(folder=…)"
                ) from exc
            self.loaded = Serving(release.name, release.version)

        await self.step("load", "load the adapter", work)

    async def compare(self, release: Release) -> None:
        """Raises unless every worker holds every tensor, bit for bit as it was written."""

        async def work() -> None:
            for rank, receipt in enumerate(await self.call_workers(ADAPTER_RECEIPT)):
                arrived = receipt.get("tensors")
                if arrived is None or not receipt["active"]:
                    why = receipt.get("error", "the adapter is not in use")
                    raise PublishError(f"{self.replica.url}, worker {rank}, has no adapter: {why}")
                wrong = _differing(release.tensors, arrived)
                if wrong:
                    raise PublishError(
                        f"{self.replica.url}, worker {rank}: {len(wrong)} of the adapter's tensors "
                        f"are not as they were sent, first {wrong[0]}"
                    )

        if self.answers_receipts:
            await self.step("compare", "say what it loaded", work)

    async def sample(self, prompt: tuple[int, ...], tokens: int) -> TokenTrace | None:
        """A completion under the adapter that was loaded; None where the server is lost.

        Sampled, where a scored prompt would do: servers whose output head can have an adapter end
        their engine over prompt log-probs (0.32, CPU), unless nothing else runs.
        """
        found: list[TokenTrace | None] = []
        request = TokenCompletionRequest(
            self.client.model or "",
            prompt,
            SamplingConfig(max_tokens=tokens, seed=0),
            extensions={"ignore_eos": True},
        )

        async def work() -> None:
            async with within(self.timeout_s, "the canary", self.replica.url):
                response = await self.client.ask_replica(self.replica, request, self.loaded)
            found.append(response.trace)

        await self.step("sample", "sample the canary", work)
        return found[0] if found else None

    def switch(self) -> Serving:
        """From here on, new requests name the adapter. Returns what they named before."""
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
            await self.ask("/v1/unload_lora_adapter", body, self.patience_s, plain=True)

    async def _limits(self) -> Mapping[str, Any] | None:
        """What the workers say that they take; None where they cannot be asked."""
        try:
            found: Mapping[str, Any] = (await self.call_workers(ADAPTER_LIMITS, self.patience_s))[0]
        except InferenceError as exc:
            if isinstance(exc, UnreachableError) and exc.status is None:
                raise
            return None
        return found


def _differing(sent: Mapping[str, Tensor], arrived: Mapping[str, list[Any]]) -> list[str]:
    """The tensors that are not there as they were sent, in the type that the server computes in."""
    named = {n.removeprefix(PREFIX).removesuffix(".weight"): t for n, t in sent.items()}
    if not arrived:
        return list(named)
    kind = str(next(iter(arrived.values()))[1])
    expected = receipt_of((n, t.to(getattr(torch, kind))) for n, t in named.items())
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
