"""Publishing in the background: the trainer waits for a copy of the weights, not for the
transfer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.deadlines import limit_of
from ludic.distributed.interfaces import (
    PolicyPublisher,
    PublishReport,
    Snapshot,
    Weights,
    named_tensors,
)
from ludic.errors import ConfigError, DeadlineError, PublishError
from ludic.plumbing.cuda_streams import wait_for
from ludic.workers.deadlines import bounded, ended


class SnapshotBuffer:
    """Memory for one copy of the weights, used again by the next: on the trainer's own device, or
    in the host's memory (pinned if they come from a GPU)."""

    def __init__(self, *, on_device: bool) -> None:
        self.on_device = on_device
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, weights: Weights) -> Snapshot:
        """Copies the weights, each as it comes. Returns when all of them are copied. What already
        is a snapshot, such as many ranks' weights that were gathered for this, stays as it is."""
        if isinstance(weights, Snapshot):
            return weights
        before, self._tensors, sources = self._tensors, {}, dict[torch.device, Tensor]()
        for name, tensor in named_tensors(weights):
            copy = before.pop(name, None)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = self._room_for(tensor)
            self._tensors[name] = copy.copy_(tensor, non_blocking=True)
            sources[tensor.device] = tensor
        # The trainer's thread launches on the same stream: an optimizer step that comes later
        # waits for the copies on the GPU, and this thread for their end.
        wait_for(sources.values())
        model = getattr(weights, "model", None)
        own = None if model is None else next(model.parameters()).device
        return Snapshot(self._tensors, model, own or next(iter(sources), None))

    def _room_for(self, tensor: Tensor) -> Tensor:
        place = tensor.device if self.on_device else torch.device("cpu")
        pinned = tensor.device.type == "cuda" and not self.on_device
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=place, pin_memory=pinned)


class BackgroundPublisher(PolicyPublisher):
    """Publishes through `inner` from a snapshot, while the trainer goes on.

    `publish` returns when the weights are copied and the model is read, or, `held`, before that;
    the copy is on its way meanwhile. One publish is under way at a time; one that has not begun is
    replaced by a newer one, so that two buffers are enough and a slow receiver holds up nobody.
    `settle` waits until the newest is published. A failure is raised by the next `publish`,
    `settle` or `check`, and by all after it. Everything but the copying happens in the caller's
    event loop: leave it only after `settle` or `abandon`.

    Args:
        inner: the publisher that sends; its `snapshots` decide where the copies are kept.
        beside: a sampler that shares the trainer's own tensors, and is told of a version at once.
        timeout_s: the deadline of one publish, if `inner` has none of its own.
        held: whether the weights change only while `updating` is held, as with the trainer. The
            model is then read after `publish` returns, and weights in the host's memory are
            copied then, too; `updating` waits for both. (Weights on a GPU are copied at once: it
            is quick, and the stream is shared.)
    """

    def __init__(
        self,
        inner: PolicyPublisher,
        *,
        beside: PolicyPublisher | None = None,
        timeout_s: float = 600.0,
        held: bool = False,
    ) -> None:
        if inner.shares_weights or inner.snapshots == "none":
            raise ConfigError(
                f"{type(inner).__name__} cannot publish from a snapshot: use it without "
                "BackgroundPublisher"
            )
        self.inner, self.beside, self.timeout_s, self.held = inner, beside, timeout_s, held
        self.shares_weights = beside is not None and beside.shares_weights
        self.published: int | None = None
        on_device = inner.snapshots == "device"
        self._buffers = [SnapshotBuffer(on_device=on_device) for _ in range(2)]
        self._sending: tuple[SnapshotBuffer, int] | None = None
        self._next: (
            tuple[SnapshotBuffer, asyncio.Task[Snapshot], asyncio.Task[None], int] | None
        ) = None
        self._copying: asyncio.Task[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: PublishError | None = None
        self.last: PublishReport | None = None
        """What the last publish that has ended did, with all its seconds."""

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        await self._copied()
        async with super().updating() if self.beside is None else self.beside.updating():
            yield

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Copies `weights` and returns; they become policy `version` later, unless newer ones do
        first. The report's `details` are those of the last publish that has ended."""
        began = time.perf_counter()
        self.drop_waiting()  # replaced: its buffer is written to from here on
        await self._copied()
        sending = None if self._sending is None else self._sending[0]
        buffer = next(free for free in self._buffers if free is not sending)
        # First of all: on several ranks reading the weights is a collective, in which no rank may
        # be missing, whatever became of the publish before.
        taking = asyncio.create_task(
            asyncio.to_thread(lambda: buffer.take(self.inner.snapshot_of(weights)))
        )
        self._copying = taking
        if not (self.held and _is_on_host(weights)):
            # Before the model is read, which would take turns with it. Who is cancelled does not
            # stop the thread.
            await asyncio.shield(taking)
        reading = asyncio.create_task(self.inner.read_model(weights, version))
        self._copying = asyncio.create_task(asyncio.wait({taking, reading}))
        await asyncio.sleep(0)  # reading has begun: without it, a publish would check nothing
        self.check()
        if self.beside is not None:
            await self.beside.publish(weights, version)
        await self.inner.prepare(weights, version)
        self._next = (buffer, taking, reading, version)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send(), name="ludic-publish")
        if not self.held:
            await asyncio.shield(reading)  # the copy is on its way already
        size = _size(taking.result()) if taking.done() and not taking.exception() else 0
        last, seconds = self.last, time.perf_counter() - began
        details: dict[str, Any] = {}
        if last is not None:
            details = {**last.details, "background_s": last.seconds, "sent_bytes": last.bytes}
            details["behind"] = version - last.version
        return PublishReport(version, seconds, size, details=details)

    async def settle(self) -> None:
        """Returns when the newest weights are published; raises what went wrong."""
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task})
        self.check()

    def check(self) -> None:
        """Raises if a publish has failed; waits for nothing."""
        if self._failure is not None:
            raise self._failure

    @property
    def is_publishing(self) -> bool:
        """Whether weights are on their way."""
        return self._task is not None and not self._task.done()

    def drop_waiting(self) -> None:
        """Forgets the snapshot that has not begun, before a newer one takes up memory."""
        self._next = None

    async def abandon(self) -> None:
        """Cuts the publish under way short, and forgets what was not begun. That is no failure: a
        later publish brings newer weights."""
        self._next, failure = None, self._failure
        if self._task is not None and not self._task.done():
            await ended(self._task)
            self._failure = failure
        await self._copied()

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint says of it: the version that is published, and those on their way."""
        on_their_way = [part[-1] for part in (self._sending, self._next) if part is not None]
        return {"published": self.published, "on_their_way": on_their_way}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes nothing over: a resumed trainer publishes its own weights before it goes on."""

    async def _send(self) -> None:
        """Publishes what is next until nothing is; the one task that does."""
        while self._next is not None:
            (buffer, taking, reading, version), self._next = self._next, None
            self._sending = (buffer, version)
            try:
                snapshot = await asyncio.shield(taking)
                self.last = await bounded(
                    self.inner.publish(snapshot, version),
                    f"the publish of version {version} in the background",
                    type(self.inner).__name__,
                    limit_of(self.inner, self.timeout_s),
                )
                await asyncio.shield(reading)
                self.published = version
            except asyncio.CancelledError:
                self._failure = PublishError(
                    f"the publish of version {version} was cut short, and "
                    f"{self._serving()} is what the samplers have"
                )
                raise
            except Exception as exc:
                why = f"{type(exc).__name__}: {exc}"
                self._failure = PublishError(
                    f"version {version} was not published in the background; {self._serving()} is "
                    f"what the samplers have: {why}"
                )
                self._failure.__cause__ = exc
                return
            finally:
                self._sending = None

    async def _copied(self) -> None:
        """Returns when nobody reads the weights any more; `_send` says whether that failed."""
        if self._copying is not None and not self._copying.done():
            done, _ = await asyncio.wait({self._copying}, timeout=self.timeout_s)
            if not done:
                raise DeadlineError("a copy of the weights", "a thread", self.timeout_s)

    def _serving(self) -> str:
        return "no version" if self.published is None else f"version {self.published}"


def _is_on_host(weights: Weights) -> bool:
    """Whether they are a model's in the host's memory, and reading them is no collective."""
    model = getattr(weights, "model", None)
    tensors = () if model is None or isinstance(weights, Snapshot) else model.parameters()
    kinds = {(tensor.device.type, hasattr(tensor, "full_tensor")) for tensor in tensors}
    return kinds == {("cpu", False)}


def _size(snapshot: Snapshot) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in snapshot.values())


def in_background(
    publisher: PolicyPublisher, timeout_s: float = 600.0, *, held: bool = False
) -> PolicyPublisher:
    """The publisher in the background, if it can publish from a snapshot; else itself."""
    if publisher.shares_weights or publisher.snapshots == "none":
        return publisher
    return BackgroundPublisher(publisher, timeout_s=timeout_s, held=held)
