"""Publishes a LoRA adapter to live servers: each version has its own name, beside earlier ones."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.deadlines import PATIENCE_S
from ludic.distributed.interfaces import Weights, named_tensors
from ludic.distributed.shared_folders import OwnedFolder, is_abandoned
from ludic.distributed.vllm.adapter_weights import PREFIX, AdapterWeights, adapter_config
from ludic.distributed.vllm.canary import differences, prompt_logprobs
from ludic.distributed.vllm.checksums import receipt as receipt_of
from ludic.distributed.vllm.checksums import refuse_not_finite
from ludic.distributed.vllm.delivery import Delivery, Job, Payload, ServerUpdate
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
from ludic.inference.vllm.rotation import Replica, Serving
from ludic.sharding.weights import ModelWeights
from ludic.types import TokenTrace

_OURS = re.compile(r"@\d+-[0-9a-f]{8}$")
_LOOK_AGAIN_S = 0.02
_CANARY_TOKENS = 4


class AdapterFolders(OwnedFolder):
    """Makes adapters' folders, all of them within its own."""

    def write(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """A new folder that PEFT and vLLM read as an adapter. No pickle."""
        from safetensors.torch import save_file

        folder = self.path / name
        folder.mkdir(mode=0o700)
        try:
            plain = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
            save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            (folder / "adapter_config.json").write_text(json.dumps(dict(config), indent=1))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder


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
    """Loads an adapter of the given rank, says what it holds, and samples from it when told to."""

    def __init__(
        self,
        payload: AdapterPayload,
        replica: Replica,
        rank: int = 0,
        timeout_s: float = PATIENCE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        # Nobody waits long for one that serves nobody.
        limit = timeout_s if replica.out is None else patience_s
        super().__init__(payload.client, replica, limit, patience_s)
        self.max_loras, self._rank, self._mine = payload.max_loras, rank, payload.folders.path
        self._ours = payload.loaded_on(replica)
        self.answers_receipts = False
        self.loaded: Serving | None = None

    async def examine(self) -> None:
        """Raises `ConfigError` where the server cannot take the adapter. Unloads what publishers
        that are gone have left there, and what came from this publisher's folder and is none of
        its adapters: an answer that got lost."""
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
            lost_track = folder.parent == self._mine and name not in self._ours
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
        trace: TokenTrace | None = None
        request = TokenCompletionRequest(
            self.client.model or "",
            prompt,
            SamplingConfig(max_tokens=tokens, seed=0),
            extensions={"ignore_eos": True},
        )

        async def work() -> None:
            nonlocal trace
            async with within(self.timeout_s, "the canary", self.replica.url):
                asking = self.client.ask_replica(self.replica, request, self.loaded)
                response = await self.watched("the canary", asking)
            trace = response.trace

        await self.step("sample", "sample the canary", work)
        return trace

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
            return (await self.call_workers(ADAPTER_LIMITS, self.patience_s))[0]  # type: ignore[no-any-return]
        except InferenceError as exc:
            if isinstance(exc, UnreachableError) and exc.status is None:
                raise
            return None


def _differing(sent: Mapping[str, Tensor], arrived: Mapping[str, list[Any]]) -> list[str]:
    """The tensors that are not there as they were sent, in the type that the server computes in."""
    plain = {n.removeprefix(PREFIX).removesuffix(".weight"): t for n, t in sent.items()}
    if not arrived:
        return list(plain)
    kind = str(next(iter(arrived.values()))[1])
    expected = receipt_of((n, t.to(getattr(torch, kind))) for n, t in plain.items())
    if expected.keys() == arrived.keys():
        return [n for n, e in expected.items() if arrived[n] != e]
    # Some models have other names inside vLLM: then as many of each kind must be there.
    unmatched = Counter(str(value) for value in arrived.values())
    wrong = []
    for name, value in expected.items():
        if unmatched[str(value)]:
            unmatched[str(value)] -= 1
        else:
            wrong.append(name)
    return wrong


class AdapterPayload(Payload):
    """The adapter of a PEFT model, and what servers still hold of the versions before.

    Besides the publishes, which come one at a time, `tidy` runs in its own task and unloads
    what is idle: `_unloading` keeps the two from unloading the same adapter. Requests come and go
    all the while; each counts itself in the `Serving` that it began with, and what is counted there
    is never unloaded. All of it happens in one event loop.
    """

    restores = True

    def __init__(self, client: VLLMChatClient, folder: str | Path | None, max_loras: int) -> None:
        if max_loras < 2:
            raise ConfigError(f"AdapterPolicyPublisher(max_loras={max_loras}): must be > 1")
        self.client, self.max_loras = client, max_loras
        self.folders = AdapterFolders(folder)
        self.current: Release | None = None
        self.old: defaultdict[Replica, list[Serving]] = defaultdict(list)
        self._written: dict[str, Path] = {}
        self._idle: set[str] = set()
        self._tidying: asyncio.Task[None] | None = None
        self._unloading = asyncio.Lock()

    def gather(self, weights: Weights) -> dict[str, Tensor]:
        if isinstance(weights, ModelWeights):
            weights = AdapterWeights(weights.model)
        # Copied: a snapshot's memory is written to again, and a server that comes back later is
        # compared with these.
        pairs = named_tensors(weights)
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in pairs}
        refuse_not_finite(tensors)
        return tensors

    def delivery(self, job: Job) -> Delivery[AdapterServer]:
        return AdapterDelivery(job, self, adapter_config(job.tensors))

    async def restore(self, replica: Replica, patience_s: float) -> bool:
        release = self.current
        if release is None:
            return False
        # A publish would have to wait for it.
        server = AdapterServer(self, replica, release.rank, patience_s, patience_s)
        await server.examine()
        if release.name in await server.adapters():
            return True
        await self.make_room(server)
        await server.load(release)
        await server.compare(release)
        if server.lost:
            why, replica.out = replica.out, None  # it is asked again after a pause
            raise UnreachableError(f"{replica.url}: {why}")
        before = server.switch()
        if before.adapter != release.name:  # else it lost the name, and has it again
            self.old[replica].append(before)
            self.keep_tidying()
        return True

    async def close(self) -> None:
        """Unloads what was published and removes its folders. The servers are left with their own
        weights, and requests go to those."""
        if self._tidying is not None:
            self._tidying.cancel()
        first = self.client.first_version
        self.client.version = first
        for replica in self.client.replicas:
            names = self.loaded_on(replica)
            replica.serving, self.old[replica] = Serving(version=first), []
            replica.version = first
            if replica.out is None and not replica.lost:
                for name in names:
                    await AdapterServer(self, replica).unload(name)
        self.current = None
        self.folders.close()

    def loaded_on(self, replica: Replica) -> set[str]:
        """The adapters that the server has of this publisher."""
        return {s.adapter for s in (*self.old[replica], replica.serving) if s.adapter}

    def write(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str) -> Path:
        """The adapter in a new folder. Called in a thread."""
        folder = self.folders.write("v" + name.rpartition("@")[2], tensors, config)
        self._written[name] = folder
        return folder

    async def make_room(self, server: AdapterServer) -> None:
        """Waits until the server can hold one more. What requests use is never pushed out: the
        server would have to read it again in the middle of them."""
        state = partial(self.state, server.replica)
        async with within(server.timeout_s, "room for one more adapter", state):
            while not await self._has_room(server):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _has_room(self, server: AdapterServer) -> bool:
        replica = server.replica
        await self._unload_idle(replica)
        servings = [*self.old[replica], replica.serving]
        # The server's own weights count as well: on the CPU, requests for them get the last
        # adapter's when its place is taken.
        return sum(s.adapter is not None or s.requests > 0 for s in servings) < server.max_loras

    async def _unload_idle(self, replica: Replica) -> None:
        async with self._unloading:
            removed = replica not in self.client.replicas
            for old in [s for s in self.old[replica] if not s.requests]:
                if old.adapter is not None and not removed:
                    await AdapterServer(self, replica).unload(old.adapter)
                self.old[replica].remove(old)
            if removed and not self.old[replica]:
                del self.old[replica]

    def keep_tidying(self) -> None:
        """Unloads old adapters when their last request ends, even where no publish follows."""

        async def tidy() -> None:
            while any(self.old.values()):
                for replica in list(self.old):
                    await self._unload_idle(replica)
                await asyncio.sleep(_LOOK_AGAIN_S)

        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.create_task(tidy())

    def remove_folders(self) -> None:
        """Removes folders that nothing has used since the publish before this one. A request that
        was cancelled may run on for a moment, and its server read the folder again."""
        used = {s.adapter for held in self.old.values() for s in held if s.requests}
        for replica in self.client.replicas:
            if replica.out is None or replica.serving.requests:
                used.add(replica.serving.adapter)
        for name in list(self._written):
            if name in used:
                self._idle.discard(name)
            elif name in self._idle:
                self._idle.remove(name)
                shutil.rmtree(self._written.pop(name), ignore_errors=True)
            else:
                self._idle.add(name)

    def state(self, replica: Replica) -> str:
        busy = [f"{s.requests} of version {s.version}" for s in self.old[replica] if s.requests]
        waits = f", among them {' and '.join(busy)}" if busy else ""
        return replica.describe() + waits


class AdapterDelivery(Delivery[AdapterServer]):
    """One publish of an adapter. No server is paused: new requests name the new version when every
    server has it, and those that run finish under the one that they began with."""

    def __init__(self, job: Job, payload: AdapterPayload, config: Mapping[str, Any]) -> None:
        self._payload, self._config, self._rank = payload, config, int(config["r"])
        limits = (job.timeout_s, job.patience_s)
        servers = [AdapterServer(payload, r, self._rank, *limits) for r in job.client.replicas]
        super().__init__(job, servers)
        self._release: Release | None = None
        self._gaps: dict[str, float] = {}

    async def stage(self) -> None:
        """The servers load the adapter and say what they hold; then each samples a little, and the
        trainer's module scores it."""
        job, payload = self.job, self._payload
        # A name that was never used: prefix caches and dead trainers may remember the others.
        name = f"{self.servers[0].model_name}@{job.version}-{secrets.token_hex(4)}"
        with job.times.timed("write"):
            folder = await asyncio.to_thread(payload.write, job.tensors, self._config, name)
        self._release = release = Release(name, job.version, folder, self._rank, job.tensors)
        await self.each(
            lambda s: s.step("room", "make room", partial(payload.make_room, s), asks=False)
        )
        await self.each(lambda s: s.load(release))
        await self.each(lambda s: s.compare(release))
        if job.model is not None:
            await asyncio.to_thread(job.canary.prompt, job.model)  # which is made the first time
            await self.each(self._check_canary)

    async def use(self) -> None:
        """From here on, new requests name the new version."""
        for server in self.servers:
            self._payload.old[server.replica].append(server.switch())
        self._payload.current = self._release
        self._payload.keep_tidying()

    async def undo(self, *, late: bool) -> None:
        if late:  # so that the error names them
            for server in self.servers:
                server.lose_if_hung()
        loaded = [(s, s.loaded.adapter) for s in self.servers if s.loaded is not None]
        await asyncio.gather(*(s.unload(name) for s, name in loaded if name is not None))

    async def close(self) -> None:
        self._payload.remove_folders()

    def details(self) -> dict[str, Any]:
        receipts = all(server.answers_receipts for server in self.servers)
        self.verified = receipts or bool(self._gaps)
        assert self._release is not None
        facts = {"plane": "adapter", "name": self._release.name, "rank": self._rank}
        return {**facts, "receipts": receipts, **self._gaps}

    async def _check_canary(self, server: AdapterServer) -> None:
        model, canary = self.job.model, self.job.canary
        assert model is not None
        prompt, budget = canary.prompt(model), canary.budget(model)
        trace = await server.sample(prompt, _CANARY_TOKENS)
        if trace is None:
            return
        ours = await asyncio.to_thread(prompt_logprobs, model, trace.token_ids)
        gaps = differences(ours[len(prompt) - 1 :], trace.completion_logprobs or ())
        if complaint := budget.complaint(*gaps):
            why = (
                f"under the adapter, the log-probs of {server.replica.url} {complaint}: has it the "
                "same weights below the adapter, in the same type? `ludic doctor` measures more"
            )
            if server.was_out is None:
                raise PublishError(why)
            server.lose(why)
            return
        worst = max((self._gaps.get("canary_mean", 0.0), self._gaps.get("canary_max", 0.0)), gaps)
        self._gaps = {"canary_mean": worst[0], "canary_max": worst[1]}
