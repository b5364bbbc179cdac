"""Publishers to live vLLM servers: whole weights, or a LoRA adapter alone.

Control goes over HTTP, tensors over a data plane or a folder. A publish gathers the tensors, lets
every server stage them beside its current weights and report what arrived, and only then switches
the servers over. The payload decides what is staged and how it is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

from torch import Tensor

from ludic.distributed.deadlines import longest_publish_s, patience_of
from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Snapshot, Weights
from ludic.distributed.vllm.adapter_payload import AdapterPayload
from ludic.distributed.vllm.adapter_weights import AdapterWeights
from ludic.distributed.vllm.canary import Canary, MismatchBudget
from ludic.distributed.vllm.delivery import Job, Payload, PublishTimes, ServersAwayError, now
from ludic.distributed.vllm.placement import Choice, PlaneName
from ludic.distributed.vllm.planes import DataPlane, IPCPlane, check_plane, open_plane
from ludic.distributed.vllm.weights_payload import WeightsPayload
from ludic.errors import ConfigError, LudicError, PublishError
from ludic.inference.retries import within
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.rotation import Replica
from ludic.sharding.weights import ModelWeights

TRIES = 3
"""How often a publish begins whose servers are all lost on the way, where others may come."""


class PublishSettings(TypedDict, total=False):
    """What every publisher to servers can be told."""

    canary: bool
    """Whether the trainer's module and each server score the same tokens, and are compared. It
    needs the model itself (`ModelWeights`, as the trainer passes it), on one rank; an adapter that
    goes out in the background has none, and is checked by receipts alone. Default: yes."""
    canary_prompt: Sequence[int] | None
    """Default: one in the model's own words."""
    budget: MismatchBudget | None
    """How far the canary's scores may lie apart. Default: by the model's type."""
    timeout_s: float
    """The deadline of a publish, from the first answer of a server on. Default: 120."""
    patience_s: float | None
    """How long one may wait for a server that is out of rotation, or that a failed publish has to
    be undone on. Default: 10, or a quarter of a short `timeout_s`."""


class ServerPublisher(PolicyPublisher):
    """Publishes a payload to the servers of `client`: to all of them, or it says what happened.

    The servers have their own copy of the weights, so nothing stops while the trainer steps.
    Publishes, and servers that come back between them, take turns; requests go on all the while. It
    all happens in the caller's event loop, except reading tensors, which is done in threads.
    """

    def __init__(
        self,
        client: VLLMChatClient,
        payload: Payload,
        *,
        canary: bool = True,
        canary_prompt: Sequence[int] | None = None,
        budget: MismatchBudget | None = None,
        timeout_s: float = 120.0,
        patience_s: float | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"{type(self).__name__}(timeout_s={timeout_s}): must be > 0")
        self.client, self.payload, self.timeout_s = client, payload, timeout_s
        self.patience_s = patience_of(timeout_s) if patience_s is None else patience_s
        self.version: int | None = None
        self.before: Callable[[], Awaitable[None]] | None = None
        """Called when a publish begins, to bring the list of servers up to date, and to wait for
        one to start. It changes servers in a `turn` alone."""
        self.servers_s = 600.0
        """How long `before` may take, beside the deadline of the publish."""
        self._canary = Canary(canary, canary_prompt, budget)
        self._lock = asyncio.Lock()
        client.keeper = self

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Makes `weights` policy `version` on every server that answers.

        Raises `PublishError` when the weights are wrong or no server could take them; servers that
        did not answer are out of rotation and named in the report. The first publish may go to any
        version (a checkpoint's); after that it never goes back.
        """
        # First of all: while this waits, scores of newer versions may take the place of these.
        canary, tries = self._canary.at(version), TRIES
        ends_at = now() + self.timeout_s + (self.servers_s if self.before else 0.0)
        while True:
            if self.before is not None:
                limit_s = min(self.servers_s, ends_at - now())
                async with within(limit_s, "a server that answers", self._states):
                    await self.before()
            try:
                return await self._take_turn(weights, version, canary, ends_at)
            except ServersAwayError:
                # Servers that come and go: if this has lost them all, it goes to those that come,
                # in the time that is left.
                tries -= 1
                again = self.before is not None and isinstance(weights, Snapshot)
                if not again or not tries or now() >= ends_at or self.client.in_rotation():
                    raise

    @property
    def longest_s(self) -> float:  # type: ignore[override]
        """See `PolicyPublisher`."""
        servers_s = self.servers_s if self.before else 0.0
        return longest_publish_s(self.timeout_s, servers_s=servers_s, patience_s=self.patience_s)

    async def _take_turn(
        self, weights: Weights, version: int, canary: Canary, ends_at: float
    ) -> PublishReport:
        limit_s = min(self.timeout_s, ends_at - now())
        async with self.turn(f"the publish of version {version}", limit_s) as deadline:
            if self.version is not None and version < self.version:
                raise PublishError(
                    f"version {version} is older than {self.version}, which is already "
                    "published: versions never go back within a run"
                )
            report = await self._publish(weights, version, canary, deadline)
            self.version = version
            return report

    async def read_model(self, weights: Weights, version: int) -> None:
        """Has the trainer's module score the canary while it still is `version`."""
        if (model := self._canary.model_of(weights)) is not None:
            await self._canary.take(model, version)

    async def restore(self, replica: Replica) -> bool:
        """Brings a server that was away up to date; False: that takes a publish."""
        if not self.payload.restores:  # else it would wait for a publish that needs it back
            return False
        async with self.turn(f"{replica.url} to come back"):
            return await self.payload.restore(replica, self.patience_s)

    async def close(self) -> None:
        """Takes back what was published, where that can be done."""
        await self.payload.close()

    async def _publish(
        self, weights: Weights, version: int, canary: Canary, deadline: asyncio.Timeout
    ) -> PublishReport:
        model = self._canary.model_of(weights)
        if isinstance(weights, Snapshot) and not canary.is_scored:
            model = None  # it has moved on, and its scores would be those of another version
        began, times = time.perf_counter(), PublishTimes()
        with times.timed("gather"):
            tensors = await asyncio.to_thread(self.payload.gather, weights)
        await self._open(weights, tensors)
        limits = (self.timeout_s, self.patience_s)
        ends_at = deadline.when()
        assert ends_at is not None
        job = Job(self.client, tensors, version, model, canary, times, *limits, ends_at)
        delivery = self.payload.delivery(job)
        every = delivery.servers
        try:
            await delivery.each(lambda server: server.greet())
            prepared = time.perf_counter() - began
            try:
                await delivery.stage()
            except BaseException as exc:
                # Shielded: a second cancellation must not leave a server paused.
                await asyncio.shield(delivery.undo(late=deadline.expired()))
                away = all(server.lost and server.away for server in every)
                error = self._as_publish_error(exc, version, away)
                raise error from (None if error is exc else exc)
            await delivery.use()
        finally:
            await delivery.close()
        self.client.version = version
        await delivery.check()
        times.slowest(server.times.seconds for server in every)
        details: dict[str, Any] = {
            "tensors": len(tensors),
            "servers": [server.replica.url for server in delivery.servers],
            "lost": {r.url: r.out for r in self.client.replicas if r.out is not None},
            "prepare_s": prepared,
            **delivery.details(),
            "stages": times.in_order(),
        }
        size = sum(t.numel() * t.element_size() for t in delivery.sent.values())
        seconds = time.perf_counter() - began
        return PublishReport(version, seconds, size, delivery.verified, details)

    async def _open(self, weights: Weights, tensors: Mapping[str, Tensor]) -> None:
        """What has to be known before the first publish."""

    @asynccontextmanager
    async def turn(self, what: str, limit_s: float | None = None) -> AsyncIterator[asyncio.Timeout]:
        """One at a time, within the deadline."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        async with within(limit_s, what, self._states) as deadline, self._lock:
            yield deadline

    def _states(self) -> str:
        return "; ".join(map(self.payload.state, self.client.replicas))

    def _as_publish_error(self, exc: BaseException, version: int, away: bool) -> BaseException:
        expected = isinstance(exc, (LudicError, RuntimeError, OSError))
        if not expected or isinstance(exc, TimeoutError):
            return exc
        serving = {r.url: r.version for r in self.client.replicas if r.out is None}
        gone = [r.describe() for r in self.client.replicas if r.out is not None]
        kind = ServersAwayError if away or isinstance(exc, ServersAwayError) else PublishError
        return kind(
            f"version {version} was not published: {exc}. The servers go on with the versions "
            f"before: {serving or 'none'}" + (f"; out of rotation: {gone}" if gone else "")
        )


class BroadcastPolicyPublisher(ServerPublisher):
    """Publishes whole weights, LoRA merged, to the servers of `client`.

    They are staged while the servers sample, and applied in a pause in which requests are kept, not
    lost.

    Args:
        client: whose servers are updated, and taken in and out of rotation.
        plane: how tensors travel: by name or, with "auto", as `choose_plane` says of where the
            servers' workers are, which the first publish asks them. Or your own `DataPlane`.
        differences: send only what changed since the version that all servers confirmed, where
            they still have it, else all weights. The trainer and each host of servers keep a copy
            of the weights in memory for it. It saves bytes and costs time to compare: for slow
            links. Not with CUDA IPC.
        settings: see `PublishSettings`.
    """

    choice: Choice | None = None
    """The plane that was chosen, and why; None before, and for your own."""

    def __init__(
        self,
        client: VLLMChatClient,
        *,
        plane: PlaneName | DataPlane = "auto",
        differences: bool = False,
        **settings: Unpack[PublishSettings],
    ) -> None:
        self._named = check_plane(plane) if isinstance(plane, str) else "auto"
        self._weights = WeightsPayload(
            None if isinstance(plane, str) else plane, differences=differences
        )
        self.snapshots = "device" if plane == "ipc" or isinstance(plane, IPCPlane) else "host"
        super().__init__(client, self._weights, **settings)

    async def _open(self, weights: Weights, tensors: Mapping[str, Tensor]) -> None:
        if self._weights.plane is not None:
            return
        sent = next(iter(tensors.values())).device
        own = getattr(weights, "device", None)  # of a snapshot: where the trainer's weights are
        self._weights.plane, self.choice = await open_plane(
            self.client,
            own or sent,
            named=self._named,
            gathered=own is not None and own != sent,
            timeout_s=self.patience_s,
            publish_s=self.timeout_s,
        )


class AdapterPolicyPublisher(ServerPublisher):
    """Publishes the LoRA adapter of a PEFT model, and nothing else, to the servers of `client`.

    The servers need `--enable-lora` and what goes with it (`ludic serve --max-lora-rank R`), and
    the weights below the adapter as the trainer has them. Each version is an adapter with a name of
    its own, loaded beside those before it; no server is paused, and a completion has one version.
    An adapter that no request uses any more is unloaded. Where a server holds as many as it can,
    because old requests still run, a publish waits for them. It takes `ModelWeights` of a PEFT
    model, or `AdapterWeights` and mappings made of it, and raises `ConfigError` for an adapter that
    a server cannot take.

    Args:
        client: whose servers get the adapter, and are taken in and out of rotation.
        folder: where adapters are written; None: shared memory. Servers on other machines need a
            folder that both see.
        max_loras: how many adapters a server holds at once, where it cannot be asked.
        settings: see `PublishSettings`.
    """

    def __init__(
        self,
        client: VLLMChatClient,
        *,
        folder: str | Path | None = None,
        max_loras: int = 2,
        **settings: Unpack[PublishSettings],
    ) -> None:
        payload = AdapterPayload(client, folder, max_loras)
        super().__init__(client, payload, **settings)
        self.folders = payload.folders
        self.snapshots = "host"

    def snapshot_of(self, weights: Weights) -> Weights:
        """The adapter alone."""
        return AdapterWeights(weights.model) if isinstance(weights, ModelWeights) else weights

    async def read_model(self, weights: Weights, version: int) -> None:
        """Nothing: the canary scores what a server samples later, and the model has moved on by
        then. A snapshot is checked by the servers' receipts alone."""
