"""`AdapterPolicyPublisher`: brings a LoRA adapter to live vLLM servers, and nothing else.

Each version is an adapter with a name of its own. It is written to shared memory, loaded by every
server beside those before it, checked, and only then named by new requests; those that run finish
under the version that they began with. No server is paused, and a completion has one version.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.interfaces import PublishReport, Weights
from ludic.distributed.vllm.adapter.folders import AdapterFolders
from ludic.distributed.vllm.adapter.server import AdapterServer, Release
from ludic.distributed.vllm.adapter.weights import AdapterWeights, adapter_config
from ludic.distributed.vllm.canary import (
    MismatchBudget,
    differences,
    prompt_logprobs,
)
from ludic.distributed.vllm.checksums import not_finite
from ludic.distributed.vllm.server_publisher import ServerPublisher
from ludic.distributed.vllm.timing import together
from ludic.errors import ConfigError, DeadlineError, LudicError, PublishError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.replica import Replica, Serving, UnreachableError
from ludic.sharding.weights import ModelWeights

_LOOK_AGAIN_S = 0.02
_CANARY_TOKENS = 4


class AdapterPolicyPublisher(ServerPublisher):
    """Publishes the LoRA adapter of a PEFT model to the servers of `client`, within `timeout_s`.

    The servers need `--enable-lora` and what goes with it (`ludic serve --max-lora-rank R`), and
    the weights below the adapter as the trainer has them. An adapter that no request uses any
    more is unloaded, and its folder removed. Where a server holds as many as it can, because old
    requests still run, a publish waits for them. It takes `ModelWeights` of a PEFT model, or
    `AdapterWeights` and mappings made of it, and raises `ConfigError` for an adapter that a server
    cannot take; after any failure the servers go on with the version before, except those that
    did not answer, which are out of rotation until a publish brings them back.

    Args:
        client: whose servers get the adapter, and are taken in and out of rotation.
        folder: where adapters are written; None: shared memory. Servers on other machines need a
            folder that both see.
        max_loras: how many adapters a server holds at once, where it cannot be asked.
        canary: whether each server samples a few tokens, which the trainer's module scores, before
            a version is used. It needs the model itself (`ModelWeights`, as the trainer passes
            it), on one rank.
        budget: how far the canary's scores may lie apart; None: by the model's type.
        timeout_s: the deadline of a whole publish.
    """

    def __init__(
        self,
        client: VLLMChatClient,
        *,
        folder: str | Path | None = None,
        max_loras: int = 2,
        canary: bool = True,
        canary_prompt: Sequence[int] | None = None,
        budget: MismatchBudget | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        if max_loras < 2:
            raise ConfigError(f"AdapterPolicyPublisher(max_loras={max_loras}): must be > 1")
        super().__init__(
            client,
            canary=canary,
            canary_prompt=canary_prompt,
            budget=budget,
            timeout_s=timeout_s,
        )
        self.max_loras = max_loras
        self.folders = AdapterFolders(folder)
        self._current: Release | None = None
        self._old: dict[Replica, list[Serving]] = {r: [] for r in client.replicas}
        self._written: dict[str, Path] = {}
        self._idle: set[str] = set()
        self._tidying: asyncio.Task[None] | None = None
        self._unloading = asyncio.Lock()
        client.restore = self._restore

    async def close(self) -> None:
        """Unloads what was published and removes its folders. The servers are left with their own
        weights, and requests go to those."""
        if self._tidying is not None:
            self._tidying.cancel()
        first = self.client.first_version
        self.client.expect_version(first)
        for replica in self.client.replicas:
            names = self._known(replica)
            replica.serving, self._old[replica] = Serving(version=first), []
            replica.version = first
            if replica.out is None and not replica.lost:
                for name in names:
                    await self._server(replica).unload(name)
        self._current = None
        self.folders.close()

    # Inside

    async def _publish(self, weights: Weights, version: int, began: float) -> PublishReport:
        tensors = await asyncio.to_thread(_gathered, weights)
        config = adapter_config(tensors)
        servers = await self._ready_servers(version, config["r"])
        release = await asyncio.to_thread(self._write, tensors, config, version)
        prepared = time.perf_counter()
        try:
            await together(s.attempt(self._make_room(s)) for s in servers)
            room = time.perf_counter()
            await together(s.attempt(s.load(release)) for s in servers)
            await together(s.attempt(s.compare(release)) for s in servers)
            servers = _still_there(servers, version)
            loaded = time.perf_counter()
            checked = await self._check_canary(weights, servers)
            servers = _still_there(servers, version)
        except BaseException as exc:
            if time.perf_counter() - began >= self.timeout_s:  # so that the error names them
                for server in servers:
                    server.lose_if_hung()
            await asyncio.shield(self._undo(servers))
            self._remove_folders()
            raise self._as_publish_error(exc, version) from exc
        for server in servers:
            self._old[server.replica].append(server.switch())
        self._current = release
        self.client.expect_version(version)
        self._remove_folders()
        self._keep_tidying()
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        receipts = all(server.answers_receipts for server in servers)
        details: dict[str, Any] = {
            "plane": "adapter",
            "name": release.name,
            "rank": release.rank,
            "tensors": len(tensors),
            "servers": [server.replica.url for server in servers],
            "lost": {r.url: r.out for r in self.client.replicas if r.out is not None},
            "receipts": receipts,
            "prepare_s": prepared - began,
            "wait_s": room - prepared,
            "load_s": loaded - room,
            **checked,
        }
        verified = receipts or bool(checked)
        return PublishReport(version, time.perf_counter() - began, size, verified, details)

    async def _ready_servers(self, version: int, rank: int) -> list[AdapterServer]:
        servers = [self._server(replica) for replica in self.client.replicas]
        mine = self.folders.path
        await together(s.attempt(s.greet(rank, mine, self._known(s.replica))) for s in servers)
        return _still_there(servers, version)

    def _server(self, replica: Replica) -> AdapterServer:
        return AdapterServer(self.client, replica, self.timeout_s, self.max_loras)

    def _write(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], version: int
    ) -> Release:
        """A name that was never used: prefix caches and dead trainers may remember the others."""
        token = secrets.token_hex(4)
        facts = next(r.facts for r in self.client.replicas if r.facts is not None)
        name = f"{self.client.model or facts.models[0]}@{version}-{token}"
        folder = self.folders.write(f"v{version}-{token}", tensors, config)
        self._written[name] = folder
        return Release(name, version, folder, config["r"], tensors)

    def _known(self, replica: Replica) -> set[str]:
        return {s.adapter for s in (*self._old[replica], replica.serving) if s.adapter}

    async def _make_room(self, server: AdapterServer) -> None:
        """Waits until the server can hold one more. What requests use is never pushed out: the
        server would have to read it again in the middle of them."""
        replica = server.replica
        try:
            async with asyncio.timeout(server.timeout_s):
                while not await self._has_room(server):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError as exc:
            what = "room for one more adapter"
            raise DeadlineError(what, self._state(replica), server.timeout_s) from exc

    async def _has_room(self, server: AdapterServer) -> bool:
        replica = server.replica
        await self._unload_idle(replica)
        held = [*self._old[replica], replica.serving]
        # The server's own weights count as well: on the CPU, requests for them get the last
        # adapter's when its place is taken.
        return sum(s.adapter is not None or s.requests > 0 for s in held) < server.max_loras

    async def _unload_idle(self, replica: Replica) -> None:
        async with self._unloading:
            for old in [s for s in self._old[replica] if not s.requests]:
                if old.adapter is not None:
                    await self._server(replica).unload(old.adapter)
                self._old[replica].remove(old)

    def _keep_tidying(self) -> None:
        """Unloads old adapters when their last request ends, also where no publish follows."""

        async def tidy() -> None:
            while any(self._old.values()):
                for replica in self._old:
                    await self._unload_idle(replica)
                await asyncio.sleep(_LOOK_AGAIN_S)

        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.create_task(tidy())

    def _remove_folders(self) -> None:
        """Removes folders that nothing has used since the publish before this one. A request that
        was cancelled may run on for a moment, and its server read the folder again."""
        used = {s.adapter for held in self._old.values() for s in held if s.requests}
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

    async def _undo(self, servers: list[AdapterServer]) -> None:
        """Unloads what no request has named yet."""
        await asyncio.gather(
            *(s.unload(s.loaded.adapter) for s in servers if s.loaded and s.loaded.adapter)
        )

    async def _check_canary(self, weights: Weights, servers: list[AdapterServer]) -> dict[str, Any]:
        """Has every server sample a little, and the trainer's module score it."""
        model = self._canary_model(weights)
        if model is None:
            return {}
        prompt = await asyncio.to_thread(self._prompt, model)
        budget = self._budget(model)
        worst = (0.0, 0.0)

        async def check(server: AdapterServer) -> None:
            nonlocal worst
            trace = await server.sample(prompt, _CANARY_TOKENS)
            if trace is None:
                return
            ours = await asyncio.to_thread(prompt_logprobs, model, trace.token_ids)
            mean, most = differences(ours[len(prompt) - 1 :], trace.completion_logprobs or ())
            if not budget.allows(mean, most):
                raise PublishError(
                    f"under the adapter, the log-probs of {server.replica.url} differ by "
                    f"{mean:.2g} on average and {most:.2g} at most (budget {budget.mean:g} and "
                    f"{budget.max:g}): has it the same weights below the adapter, in the same "
                    "type? `ludic doctor` measures more"
                )
            worst = max(worst, (mean, most))

        await together(server.attempt(check(server)) for server in servers)
        return {"canary_mean": worst[0], "canary_max": worst[1]}

    async def _restore(self, replica: Replica) -> bool:
        """Gives a server that was away the current adapter; whether there is one."""
        try:
            async with asyncio.timeout(self.timeout_s), self._lock:
                release = self._current
                if release is None:
                    return False
                server = self._server(replica)
                server.timeout_s = server.clean_up_s  # a publish would have to wait for it
                await server.examine(release.rank, self.folders.path, self._known(replica))
                if release.name in await server.adapters():
                    return True
                await self._make_room(server)
                await server.load(release)
                await server.compare(release)
                if server.lost:
                    why, replica.out = replica.out, None  # it is asked again after a pause
                    raise UnreachableError(f"{replica.url}: {why}")
                before = server.switch()
                if before.adapter != release.name:  # else it lost the name, and has it again
                    self._old[replica].append(before)
                    self._keep_tidying()
                return True
        except TimeoutError as exc:
            if isinstance(exc, DeadlineError):
                raise
            raise DeadlineError("the current adapter", replica.url, self.timeout_s) from exc

    def _as_publish_error(self, exc: BaseException, version: int) -> BaseException:
        wrapped = isinstance(exc, (LudicError, RuntimeError, OSError))
        if not wrapped or isinstance(exc, TimeoutError):
            return exc
        kept = {r.url: r.version for r in self.client.replicas if r.out is None}
        gone = [r.describe() for r in self.client.replicas if r.out is not None]
        return PublishError(
            f"version {version} was not published: {exc}. The servers go on with the versions "
            f"before: {kept or 'none'}" + (f"; out of rotation: {gone}" if gone else "")
        )

    def _states(self) -> str:
        return "; ".join(map(self._state, self.client.replicas))

    def _state(self, replica: Replica) -> str:
        busy = [f"{s.requests} of version {s.version}" for s in self._old[replica] if s.requests]
        waits = f", among them {' and '.join(busy)}" if busy else ""
        return replica.describe() + waits


def _gathered(weights: Weights) -> dict[str, Tensor]:
    if isinstance(weights, ModelWeights):
        weights = AdapterWeights(weights.model)
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    tensors = {name: tensor.detach().cpu() for name, tensor in pairs}
    broken = not_finite(tensors.items())
    if broken:
        raise PublishError(
            f"{len(broken)} tensors of the adapter hold NaN or infinity, first {broken[0]}: they "
            "are not published, and the servers keep the version before. Lower the learning rate, "
            "or go back to a checkpoint"
        )
    return tensors


def _still_there(servers: list[AdapterServer], version: int) -> list[AdapterServer]:
    left = [server for server in servers if not server.lost]
    if not left:
        why = "; ".join(server.replica.describe() for server in servers)
        raise PublishError(f"version {version} could not be published, no server is there: {why}")
    return left
