"""`BroadcastPolicyPublisher`: brings weights to live vLLM servers, checked, or says what happened.

Control goes over HTTP, tensors over a data plane. One publish: gather and check the weights; pause
every server (requests are kept, not lost); let them stage the tensors and answer with checksums;
only when those agree, apply and name the version; resume. Until they apply, servers still have
their old weights, and are resumed on them when anything fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from torch import Tensor

from ludic.distributed.canary import (
    MismatchBudget,
    canary_tokens,
    differences,
    is_sharded,
    prompt_logprobs,
)
from ludic.distributed.checksums import checksums, not_finite
from ludic.distributed.interfaces import PublishReport, Weights
from ludic.distributed.planes import (
    BroadcastPlane,
    DataPlane,
    IPCPlane,
    SharedMemoryPlane,
    Shipment,
    plane_for,
)
from ludic.distributed.server_update import CLEAN_UP_TIMEOUT_S, ServerUpdate, Stage
from ludic.distributed.weights import ModelWeights
from ludic.errors import ConfigError, DeadlineError, LudicError, PublishError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.inference.vllm_client import VLLMChatClient
from ludic.inference.vllm_replica import Replica, UnreachableError

PlaneName = Literal["auto", "shared_memory", "ipc", "nccl", "gloo"]


class BroadcastPolicyPublisher:
    """Publishes to the servers of `client`, all of them, within `timeout_s`.

    Args:
        client: whose servers are updated, and taken in and out of rotation.
        plane: how tensors travel. "auto": CUDA IPC for weights on a GPU, shared memory for
            others; "nccl" for servers on other GPUs. Or a `DataPlane` of your own.
        canary: whether one prompt is scored on both sides after each publish. It needs the model
            itself (`ModelWeights`, as the trainer passes it), on one rank.
        budget: how far the canary's scores may lie apart; None: by the model's type.
        timeout_s: the deadline of a whole publish.
    """

    shares_weights = False

    def __init__(
        self,
        client: VLLMChatClient,
        *,
        plane: PlaneName | DataPlane = "auto",
        canary: bool = True,
        canary_prompt: Sequence[int] | None = None,
        budget: MismatchBudget | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"BroadcastPolicyPublisher(timeout_s={timeout_s}): must be > 0")
        self.client = client
        self.timeout_s = timeout_s
        self.budget = budget
        self.canary = canary
        self.canary_prompt = None if canary_prompt is None else tuple(canary_prompt)
        self.version: int | None = None
        self._plane = _make_plane(plane)
        self._lock = asyncio.Lock()
        client.weight_sender = self.publish

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """The servers have a copy of their own: nothing needs to stop while the trainer steps."""
        yield

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        """Makes `weights` policy `version` on every server that answers.

        Raises `PublishError` when the weights are wrong or no server could take them; servers that
        did not answer are out of rotation and named in the report. The first publish may go to any
        version (a checkpoint's); after that it never goes back.
        """
        if self.version is not None and version < self.version:
            raise PublishError(
                f"version {version} is older than {self.version}, which was published before: "
                "versions never go back within a run"
            )
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s), self._lock:
                report = await self._publish(weights, version, began)
        except TimeoutError as exc:
            if isinstance(exc, DeadlineError):
                raise
            states = "; ".join(r.describe() for r in self.client.replicas)
            raise DeadlineError(
                f"the publish of version {version}", states, self.timeout_s
            ) from exc
        self.version = version
        return report

    async def _publish(self, weights: Weights, version: int, began: float) -> PublishReport:
        tensors = await asyncio.to_thread(_gathered, weights)
        expected = await asyncio.to_thread(_expected, tensors)
        self._plane = self._plane or plane_for(tensors)
        plane = self._plane
        shipment = await asyncio.to_thread(plane.prepare, tensors)
        prepared = time.perf_counter() - began
        try:
            updates = await self._ready_servers(version)
            paused = time.perf_counter()
            try:
                await self._transfer(updates, shipment, plane)
                await _all(update.compare(expected) for update in updates)
            except BaseException as exc:
                plane.abandon()
                await self._undo(updates)
                raise _as_publish_error(exc, updates, version) from exc
            await self._apply(updates, version)
            stall = time.perf_counter() - paused
        finally:
            await asyncio.to_thread(shipment.close)
        details: dict[str, Any] = {
            "plane": plane.name,
            "tensors": len(tensors),
            "servers": [u.replica.url for u in updates if u.stage is Stage.DONE],
            "lost": {r.url: r.out for r in self.client.replicas if r.out is not None},
            "prepare_s": prepared,
            "stall_s": stall,
        }
        self.client.expect_version(version)
        if self.canary:
            details |= await self._check_canary(weights, updates, version)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        return PublishReport(version, time.perf_counter() - began, size, True, details)

    async def _ready_servers(self, version: int) -> list[ServerUpdate]:
        """The servers that answer and can be updated, those out of rotation included."""
        updates = [ServerUpdate(self.client, r, self.timeout_s) for r in self.client.replicas]
        await _all(update.greet() for update in updates)
        ready = [u for u in updates if u.stage is Stage.GREETED]
        if not ready:
            why = "; ".join(u.replica.describe() for u in updates)
            raise PublishError(
                f"version {version} could not be published, no server is there: {why}"
            )
        return ready

    async def _transfer(
        self, updates: list[ServerUpdate], shipment: Shipment, plane: DataPlane
    ) -> None:
        """Pauses the servers and lets them stage the tensors, statuses watched all the while."""
        await _all(update.pause() for update in updates)
        _drop_lost(updates)
        invitation = plane.invitation(sum(u.workers for u in updates), self.timeout_s)
        if invitation is not None:
            await _all(
                [
                    asyncio.to_thread(plane.join),
                    *(u.invite(dict(invitation), 1 + first) for u, first in _ranks(updates)),
                ]
            )
        await _all(update.start() for update in updates)
        _drop_lost(updates)
        receiving = [update.receive(dict(shipment.update)) for update in updates]
        if shipment.move is None:
            await _all(receiving)
        else:
            # A server that refuses ends this at once: nobody waits in a broadcast for it.
            await _all([asyncio.to_thread(shipment.move), *receiving])
        _drop_lost(updates)

    async def _apply(self, updates: list[ServerUpdate], version: int) -> None:
        """Past this point a server that fails may have any weights: it is out of rotation."""
        applying = asyncio.ensure_future(_all(update.finish(version) for update in updates))
        try:
            await asyncio.shield(applying)
        except asyncio.CancelledError:
            # The servers are reading the tensors: a moment more, then they count as lost.
            await asyncio.wait({applying}, timeout=CLEAN_UP_TIMEOUT_S)
            applying.cancel()
            for update in updates:
                if update.stage is Stage.APPLYING:
                    update.lose(f"it had not applied version {version} by the deadline")
            raise
        done = [u for u in updates if u.stage is Stage.DONE]
        if not done:
            why = "; ".join(u.replica.describe() for u in updates)
            raise PublishError(f"version {version} was applied by no server: {why}")

    async def _undo(self, updates: list[ServerUpdate]) -> None:
        """Resumes the servers on their old weights; those that cannot be are out of rotation."""
        await asyncio.shield(_all(update.undo() for update in updates))

    async def _check_canary(
        self, weights: Weights, updates: list[ServerUpdate], version: int
    ) -> dict[str, Any]:
        model = weights.model if isinstance(weights, ModelWeights) else None
        if model is None or is_sharded(model):
            return {}
        if self.canary_prompt is None:
            self.canary_prompt = await asyncio.to_thread(canary_tokens, model)
        tokens = self.canary_prompt
        budget = self.budget or MismatchBudget.for_dtype(next(model.parameters()).dtype)
        ours = await asyncio.to_thread(prompt_logprobs, model, tokens)
        worst, scored = (0.0, 0.0), 0
        for update in updates:
            if update.stage is not Stage.DONE:
                continue
            try:
                theirs = await self._server_scores(update.replica, tokens)
            except UnreachableError as exc:
                update.lose(f"it went away before the canary of version {version}: {exc}")
                continue
            scored += 1
            mean, most = differences(ours, theirs)
            if not budget.allows(mean, most):
                update.replica.out = (
                    f"after version {version} its log-probs of the canary differ by {mean:.2g} on "
                    f"average and {most:.2g} at most (budget {budget.mean:g} and {budget.max:g})"
                )
                raise PublishError(
                    f"{update.replica.describe()}. It is out of rotation: is it the same model, in "
                    "the same type? `ludic doctor` measures more"
                )
            worst = max(worst, (mean, most))
        if not scored:
            why = "; ".join(u.replica.describe() for u in updates)
            raise PublishError(f"no server is left after version {version}: {why}")
        return {"canary_mean": worst[0], "canary_max": worst[1]}

    async def _server_scores(self, replica: Replica, tokens: tuple[int, ...]) -> list[float]:
        facts = replica.facts
        name = self.client.model or (facts.models[0] if facts is not None else "")
        request = TokenCompletionRequest(
            name,
            tokens,
            SamplingConfig(max_tokens=1),
            ReturnSpec(logprobs=False, prompt_logprobs=True),
        )
        response = await self.client.ask_replica(replica, request)
        return [float(s) for s in response.info["prompt_logprobs"][1:]]


def _make_plane(plane: str | DataPlane) -> DataPlane | None:
    if not isinstance(plane, str):
        return plane
    if plane == "auto":
        return None
    if plane == "shared_memory":
        return SharedMemoryPlane()
    if plane == "ipc":
        return IPCPlane()
    if plane in ("nccl", "gloo"):
        return BroadcastPlane(backend=plane)
    raise ConfigError(
        f"unknown data plane {plane!r}: one of auto, shared_memory, ipc, nccl, gloo, or your own"
    )


def _gathered(weights: Weights) -> dict[str, Tensor]:
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    tensors = {name: tensor.detach() for name, tensor in pairs}
    if not tensors:
        raise PublishError("there are no weights to publish")
    broken = not_finite(tensors.items())
    if broken:
        raise PublishError(
            f"{len(broken)} tensors hold NaN or infinity, first {broken[0]}: they are not "
            "published, and the servers keep their weights. Lower the learning rate, or go back "
            "to a checkpoint"
        )
    return tensors


def _expected(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    sums = checksums(tensors.items())
    return {
        name: [str(sums[name]), str(tensor.dtype).split(".")[-1], list(tensor.shape)]
        for name, tensor in tensors.items()
    }


def _ranks(updates: list[ServerUpdate]) -> list[tuple[ServerUpdate, int]]:
    """Each server with the number of workers before its own."""
    found, first = [], 0
    for update in updates:
        found.append((update, first))
        first += update.workers
    return found


def _drop_lost(updates: list[ServerUpdate]) -> None:
    """Goes on without servers that died; raises where none is left."""
    lost = [u for u in updates if u.stage is Stage.LOST]
    for update in lost:
        updates.remove(update)
    if not updates:
        why = "; ".join(u.replica.describe() for u in lost)
        raise PublishError(f"no server is left to publish to: {why}")


async def _all(steps: Any) -> None:
    """Runs the steps together; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _as_publish_error(
    exc: BaseException, updates: list[ServerUpdate], version: int
) -> BaseException:
    if not isinstance(exc, (LudicError, RuntimeError, OSError)) or isinstance(exc, TimeoutError):
        return exc
    old = [u.replica.url for u in updates if u.stage is Stage.UNDONE]
    gone = [u.replica.describe() for u in updates if u.stage is Stage.LOST]
    return PublishError(
        f"version {version} was not published: {exc}. Back on their old weights: {old or 'none'}"
        + (f"; out of rotation: {gone}" if gone else "")
    )
