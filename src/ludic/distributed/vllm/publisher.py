"""`BroadcastPolicyPublisher`: brings weights to live vLLM servers, checked, or says what happened.

Control goes over HTTP, tensors over a data plane. One publish: gather the weights; let every server
stage them beside the old ones and answer with checksums, while the trainer looks for NaN, computes
its own checksums and scores the canary; only when all agree, pause the servers (requests are kept,
not lost), apply, name the version, and resume. Until they are paused, servers sample from their old
weights; until they apply they have them still, and go on with them when anything fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ludic.distributed.interfaces import PublishReport, Weights
from ludic.distributed.vllm.canary import (
    MismatchBudget,
    differences,
    prompt_logprobs,
)
from ludic.distributed.vllm.planes import (
    BroadcastPlane,
    DataPlane,
    IPCPlane,
    SharedMemoryPlane,
    Shipment,
    Shipping,
    plane_for,
)
from ludic.distributed.vllm.server_publisher import ServerPublisher
from ludic.distributed.vllm.server_update import CLEAN_UP_TIMEOUT_S, ServerUpdate, Stage
from ludic.distributed.vllm.timing import Stages, together
from ludic.distributed.vllm.trainer_checks import TrainerChecks
from ludic.errors import ConfigError, LudicError, PublishError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.replica import Replica, UnreachableError

PlaneName = Literal["auto", "shared_memory", "ipc", "nccl", "gloo"]


class BroadcastPolicyPublisher(ServerPublisher):
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
        super().__init__(
            client,
            canary=canary,
            canary_prompt=canary_prompt,
            budget=budget,
            timeout_s=timeout_s,
        )
        self._plane = _make_plane(plane)

    async def _publish(self, weights: Weights, version: int, began: float) -> PublishReport:
        stages = Stages()
        with stages.timed("gather"):
            tensors = await asyncio.to_thread(_gathered, weights)
        self._plane = self._plane or plane_for(tensors)
        plane, model = self._plane, self._canary_model(weights)
        scores = None if model is None else partial(self._own_scores, model)
        checks = TrainerChecks(tensors, scores, stages)
        shipping = Shipping(plane, tensors, stages)
        every = [ServerUpdate(self.client, r, self.timeout_s) for r in self.client.replicas]
        try:
            await together([shipping.ready(), *(update.greet() for update in every)])
            prepared = time.perf_counter() - began
            updates = _ready(every, version)
            try:
                shipment = await shipping.ready()
                staging = self._stage(updates, shipment, plane, checks, stages)
                await together([staging, checks.done()])
                paused = time.perf_counter()
                await together(update.pause() for update in updates)
                _drop_lost(updates)
            except BaseException as exc:
                plane.abandon()
                await asyncio.shield(together(update.undo() for update in updates))
                error = _as_publish_error(exc, every, version)
                raise error from (None if error is exc else exc)
            await self._apply(updates, version)
            stall = time.perf_counter() - paused
        finally:
            await asyncio.gather(
                checks.stop(CLEAN_UP_TIMEOUT_S), shipping.close(CLEAN_UP_TIMEOUT_S)
            )
        self.client.expect_version(version)
        canary = {}
        if model is not None and checks.scores is not None:
            with stages.timed("canary"):
                canary = await self._check_canary(model, checks.scores, updates, version)
        stages.slowest(update.stages.seconds for update in every)
        stages.slowest((update.worker_seconds for update in every), prefix="worker_")
        details: dict[str, Any] = {
            "plane": plane.name,
            "tensors": len(tensors),
            "servers": [u.replica.url for u in updates if u.stage is Stage.DONE],
            "lost": {r.url: r.out for r in self.client.replicas if r.out is not None},
            "prepare_s": prepared,
            "stall_s": stall,
            "stages": stages.in_order(),
            **canary,
        }
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        return PublishReport(version, time.perf_counter() - began, size, True, details)

    async def _stage(
        self,
        updates: list[ServerUpdate],
        shipment: Shipment,
        plane: DataPlane,
        checks: TrainerChecks,
        stages: Stages,
    ) -> None:
        """Lets the servers stage the tensors and say what arrived. They go on sampling."""
        invitation = plane.invitation(sum(u.workers for u in updates), self.timeout_s)
        if invitation is not None:
            inviting = [u.invite(dict(invitation), 1 + first) for u, first in _ranks(updates)]
            with stages.timed("join"):
                await together([asyncio.to_thread(plane.join), *inviting])
        await together(update.start() for update in updates)
        _drop_lost(updates)
        receiving = [update.receive(dict(shipment.update)) for update in updates]
        if shipment.move is not None:
            # A server that refuses ends this at once: nobody waits in a broadcast for it.
            receiving.append(asyncio.to_thread(shipment.move))
        await together(receiving)
        _drop_lost(updates)
        expected = await checks.expected
        await together(update.compare(expected) for update in updates)
        _drop_lost(updates)

    async def _apply(self, updates: list[ServerUpdate], version: int) -> None:
        """Past this point a server that fails may have any weights: it is out of rotation."""
        applying = asyncio.ensure_future(together(update.finish(version) for update in updates))
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

    def _own_scores(self, model: nn.Module) -> list[float]:
        return prompt_logprobs(model, self._prompt(model))

    async def _check_canary(
        self, model: nn.Module, ours: list[float], updates: list[ServerUpdate], version: int
    ) -> dict[str, Any]:
        """Compares the servers' scores with `ours`; one over the budget is out of rotation."""
        done = [u for u in updates if u.stage is Stage.DONE]
        budget = self._budget(model)
        asked = [self._server_scores(u.replica, self._prompt(model)) for u in done]
        answers = await asyncio.gather(
            *asked, *(u.look_back() for u in done), return_exceptions=True
        )
        worst, scored, over = (0.0, 0.0), 0, []
        for update, theirs in zip(done, answers, strict=False):
            if isinstance(theirs, UnreachableError):
                update.lose(f"it went away before the canary of version {version}: {theirs}")
                continue
            if isinstance(theirs, BaseException):
                raise theirs
            assert theirs is not None
            scored += 1
            mean, most = differences(ours, theirs)
            if not budget.allows(mean, most):
                update.lose(
                    f"after version {version} its log-probs of the canary differ by {mean:.2g} on "
                    f"average and {most:.2g} at most (budget {budget.mean:g} and {budget.max:g})"
                )
                over.append(update.replica.describe())
            worst = max(worst, (mean, most))
        if over:
            raise PublishError(
                f"{'; '.join(over)}: is it the same model, in the same type? `ludic doctor` "
                "measures more"
            )
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
    return tensors


def _ready(updates: list[ServerUpdate], version: int) -> list[ServerUpdate]:
    """The servers that answered and can be updated, those out of rotation included."""
    ready = [u for u in updates if u.stage is Stage.GREETED]
    if not ready:
        why = "; ".join(u.replica.describe() for u in updates)
        raise PublishError(f"version {version} could not be published, no server is there: {why}")
    return ready


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
