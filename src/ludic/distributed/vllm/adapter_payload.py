"""A LoRA adapter to live servers: each version under its own name, beside the ones before it."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.interfaces import Weights, named_tensors
from ludic.distributed.vllm.adapter_server import AdapterServer, Release
from ludic.distributed.vllm.adapter_weights import AdapterWeights, adapter_config
from ludic.distributed.vllm.canary import differences, prompt_logprobs
from ludic.distributed.vllm.checksums import refuse_not_finite
from ludic.distributed.vllm.delivery import PATIENCE_S, Delivery, Job, Payload
from ludic.distributed.vllm.shared_memory import OwnedFolder
from ludic.errors import ConfigError, PublishError
from ludic.inference.http import UnreachableError
from ludic.inference.retries import within
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.servers import Replica, Serving
from ludic.sharding.weights import ModelWeights


class AdapterFolders(OwnedFolder):
    """Makes and removes adapters' folders, all of them within its own."""

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
            self.remove(folder)
            raise
        return folder

    def remove(self, folder: Path) -> None:
        """Removes one; one that is gone is not an error."""
        shutil.rmtree(folder, ignore_errors=True)


_LOOK_AGAIN_S = 0.02
_CANARY_TOKENS = 4


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
        self.old: dict[Replica, list[Serving]] = {r: [] for r in client.replicas}
        self._written: dict[str, Path] = {}
        self._idle: set[str] = set()
        self._tidying: asyncio.Task[None] | None = None
        self._unloading = asyncio.Lock()

    def gather(self, weights: Weights) -> dict[str, Tensor]:
        if isinstance(weights, ModelWeights):
            weights = AdapterWeights(weights.model)
        tensors = {name: tensor.detach().cpu() for name, tensor in named_tensors(weights)}
        refuse_not_finite(tensors)
        return tensors

    def delivery(self, job: Job) -> Delivery[AdapterServer]:
        return AdapterDelivery(job, self, adapter_config(job.tensors))

    async def restore(self, replica: Replica, patience_s: float) -> bool:
        release = self.current
        if release is None:
            return False
        # A publish would have to wait for it.
        server = self.server(replica, release.rank, patience_s, patience_s)
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
        self.client.expect_version(first)
        for replica in self.client.replicas:
            names = self.known(replica)
            replica.serving, self.old[replica] = Serving(version=first), []
            replica.version = first
            if replica.out is None and not replica.lost:
                for name in names:
                    await self.server(replica).unload(name)
        self.current = None
        self.folders.close()

    def server(
        self,
        replica: Replica,
        rank: int = 0,
        timeout_s: float = PATIENCE_S,
        patience_s: float = PATIENCE_S,
    ) -> AdapterServer:
        """A server that is to take an adapter of this rank."""
        return AdapterServer(
            self.client,
            replica,
            timeout_s,
            patience_s,
            self.max_loras,
            rank,
            self.folders.path,
            self.known(replica),
        )

    def known(self, replica: Replica) -> set[str]:
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
        held = [*self.old[replica], replica.serving]
        # The server's own weights count as well: on the CPU, requests for them get the last
        # adapter's when its place is taken.
        return sum(s.adapter is not None or s.requests > 0 for s in held) < server.max_loras

    async def _unload_idle(self, replica: Replica) -> None:
        async with self._unloading:
            for old in [s for s in self.old[replica] if not s.requests]:
                if old.adapter is not None:
                    await self.server(replica).unload(old.adapter)
                self.old[replica].remove(old)

    def keep_tidying(self) -> None:
        """Unloads old adapters when their last request ends, even where no publish follows."""

        async def tidy() -> None:
            while any(self.old.values()):
                for replica in self.old:
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
                self.folders.remove(self._written.pop(name))
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
        servers = [payload.server(r, self._rank, *limits) for r in job.client.replicas]
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
        named = {"plane": "adapter", "name": self._release.name, "rank": self._rank}
        return {**named, "receipts": receipts, **self._gaps}

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
