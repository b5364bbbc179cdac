"""Whole weights to live servers: staged while they sample, applied in a short pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from ludic.distributed.interfaces import Weights, named_tensors
from ludic.distributed.vllm.canary import differences
from ludic.distributed.vllm.checksums import receipt, refuse_not_finite
from ludic.distributed.vllm.delivery import Delivery, Job, Payload, ServerUpdate, together
from ludic.distributed.vllm.placement import PlaneName
from ludic.distributed.vllm.planes import DataPlane, Shipment, make_plane, plane_for
from ludic.errors import ConfigError, DeadlineError, InferenceError, LudicError, PublishError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.http import UnreachableError
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.inference.vllm.flags import RECEIPT


class WeightsServer(ServerUpdate):
    """Opens an update, takes the tensors in, and applies them, or goes on with the old ones."""

    workers = 1
    opened = False
    done = False
    """It has applied the update and serves again."""
    worker_seconds: Mapping[str, float] = {}
    """What the server's slowest worker says that its own parts took."""

    async def examine(self) -> None:
        facts = self.replica.facts
        if facts is not None and not facts.updates:
            raise ConfigError(
                f"{self.replica.url} (vLLM {facts.vllm_version}) has no routes for weight "
                "updates: start it with `python -m ludic.inference.vllm_server`, which "
                "sets VLLM_SERVER_DEV_MODE=1; vLLM before 0.26 does not have them"
            )
        world = await self.ask("/get_world_size", seconds=self.patience_s, method="GET")
        self.workers = int(world["world_size"])

    async def invite(self, invitation: Mapping[str, Any], rank_offset: int) -> None:
        """Has the server's workers join the trainer's broadcast group."""
        body = {"init_info": {**invitation, "rank_offset": rank_offset}}
        await self.ask("/init_weight_transfer_engine", body)

    async def start(self) -> None:
        """Opens the update; one that a dead trainer left open is closed first."""
        await self.step("start", "open an update", self._open)
        self.opened = not self.lost

    async def receive(self, update: Mapping[str, Any]) -> None:
        """Has the server stage the tensors. Returns when it has them all."""
        body = {"update_info": dict(update)}
        await self.step("stage", "take the tensors", partial(self.ask, "/update_weights", body))

    async def compare(self, expected: Mapping[str, list[Any]]) -> None:
        """Raises unless every worker has every tensor, bit for bit as it was sent."""

        async def work() -> None:
            receipts = await self.call_workers(RECEIPT)
            self.worker_seconds = _slowest(receipts, ("stage", "checksums"))
            _check(self.replica.url, receipts, expected)

        await self.step("compare", "say what arrived", work)

    async def pause(self) -> None:
        """Freezes the server's requests; none is lost."""
        await self.step("pause", "pause", partial(self.ask, "/pause?mode=keep&clear_cache=true"))

    async def finish(self, version: int) -> None:
        """Has the server use the tensors, forget what it computed with the old, and go on."""
        facts = self.replica.facts
        named = {"weight_version": str(version)} if facts and facts.names_versions else None
        forget = "/reset_prefix_cache?reset_running_requests=true"
        try:
            # It computes nothing meanwhile, so it does not matter which of the two comes first.
            await together(
                [self._timed("apply", "/finish_weight_update", named), self._timed("reset", forget)]
            )
            await self._timed("resume", "/resume")
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it failed while it applied version {version}: {exc}")
            await self._send_away()
            return
        self.replica.version = version
        self.replica.out = None
        self.replica.mark_up()
        self.done = True

    async def look_back(self) -> None:
        """Asks how long it took to apply, for the log; without an answer nothing is known."""
        with suppress(InferenceError, DeadlineError):
            receipts = await self.call_workers(RECEIPT)
            self.worker_seconds = {**self.worker_seconds, **_slowest(receipts, ("apply",))}

    async def undo(self) -> None:
        """Drops what was staged; the server goes on with the old weights, and is resumed even
        where somebody else paused it. One that was out of rotation stays there."""
        if self.lost:
            return
        try:
            if self.opened:
                await self._discard()
            if self.was_out is not None:
                self.lose(self.was_out)
                return
            await self.ask("/resume", seconds=self.patience_s)
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it could not be resumed after a failed publish: {exc}")
            await self._send_away()

    async def explained(self, what: str, refusal: InferenceError) -> LudicError:
        if await self._has_our_engine():
            return await super().explained(what, refusal)
        return ConfigError(
            f"{self.replica.url} was started without Ludic's side of a weight transfer, so it "
            f"cannot be updated: start it with `ludic serve`. It said: {refusal}"
        )

    async def _open(self) -> None:
        # One that is out may hang, and the others wait for it.
        limit = self.timeout_s if self.was_out is None else self.patience_s
        try:
            await self.ask("/start_weight_update", seconds=limit)
        except InferenceError as exc:
            if isinstance(exc, UnreachableError) and exc.status is None:
                raise
            with suppress(DeadlineError):
                await self._discard()
            await self.ask("/start_weight_update")

    async def _send_away(self) -> None:
        """Ends the server's requests, so that whoever waits for them asks elsewhere."""
        with suppress(InferenceError, DeadlineError):
            await self.ask("/pause?mode=abort", seconds=self.patience_s)

    async def _discard(self) -> None:
        body = {"update_info": {"plane": "discard"}}
        with suppress(InferenceError):
            # Refused when a failed part has closed the update already.
            await self.ask("/update_weights", body, self.patience_s)
            await self.ask("/finish_weight_update", None, self.patience_s)

    async def _has_our_engine(self) -> bool:
        """Whether its workers can say what arrived."""
        try:
            receipts = await self.call_workers(RECEIPT, self.patience_s)
            return all("tensors" in receipt for receipt in receipts)
        except (InferenceError, DeadlineError, KeyError, TypeError):
            return False

    async def _timed(self, stage: str, path: str, body: Any = None) -> None:
        with self.times.timed(stage):
            await self.ask(path, body)


def _check(url: str, receipts: list[Any], expected: Mapping[str, list[Any]]) -> None:
    """Raises unless there are receipts, and all say what is expected."""
    if not receipts:
        raise PublishError(f"{url} did not answer with a receipt")
    for rank, answer in enumerate(receipts):
        if not isinstance(answer, Mapping) or "tensors" not in answer:
            why = answer.get("error") if isinstance(answer, Mapping) else answer
            raise PublishError(f"{url}, worker {rank}, has no receipt: {why}")
        arrived = answer["tensors"]
        lacking = sorted(expected.keys() - arrived.keys())
        wrong = [n for n, e in expected.items() if n in arrived and arrived[n] != e]
        if lacking or wrong:
            raise PublishError(
                f"{url}, worker {rank}: {len(lacking)} tensors did not arrive {lacking[:3]}, "
                f"{len(wrong)} arrived changed {wrong[:3]}"
            )


def _slowest(receipts: list[Any], parts: tuple[str, ...]) -> dict[str, float]:
    """The longest that a worker says each part took it; nothing of those who do not say."""
    took = [r.get("seconds", {}) for r in receipts if isinstance(r, Mapping)]
    return {p: max(s[p] for s in took if p in s) for p in parts if any(p in s for s in took)}


class WeightsPayload(Payload):
    """All of a model's weights, over a data plane."""

    def __init__(self, plane: PlaneName | DataPlane) -> None:
        named = isinstance(plane, str) and plane != "auto"
        self.plane: str | DataPlane = make_plane(str(plane)) if named else plane

    def gather(self, weights: Weights) -> dict[str, Tensor]:
        tensors = {name: tensor.detach() for name, tensor in named_tensors(weights)}
        if not tensors:
            raise PublishError("there are no weights to publish")
        return tensors

    def delivery(self, job: Job) -> Delivery[WeightsServer]:
        if isinstance(self.plane, str):
            self.plane = plane_for(job.tensors)
        return WeightsDelivery(job, self.plane)


class WeightsDelivery(Delivery[WeightsServer]):
    """One publish of weights.

    What runs at the same time: the trainer's checks (for NaN, then checksums, then its scores of
    the canary) and the plane's `prepare`, each in a thread, beside the servers' staging. All of
    them only read the tensors, and nobody writes meanwhile: the trainer steps when its publish has
    ended. Until they are paused, servers sample from their old weights; until they apply they have
    them still, and go on with them when anything fails. Nothing is applied before all checks are
    done.
    """

    def __init__(self, job: Job, plane: DataPlane) -> None:
        limits = (job.timeout_s, job.patience_s)
        super().__init__(job, [WeightsServer(job.client, r, *limits) for r in job.client.replicas])
        self._every = self.servers
        self._plane = plane
        self._closed = False
        self._scores: list[float] | None = None
        self._expected = asyncio.create_task(asyncio.to_thread(self._expect))
        self._checks = asyncio.create_task(self._check_own())
        self._shipment = asyncio.create_task(asyncio.to_thread(self._prepare))
        self._stall_s = 0.0
        self._gaps: dict[str, float] = {}

    async def stage(self) -> None:
        """The servers take the tensors in and say what arrived, then pause."""
        # Shielded, as are the checks: a thread cannot be cancelled, and `close` waits for it.
        shipment = await asyncio.shield(self._shipment)
        await together([self._receive(shipment), asyncio.shield(self._checks)])
        self._stall_s = -time.perf_counter()
        await self.each(lambda server: server.pause())

    async def use(self) -> None:
        """Past this point a server that fails may have any weights: it is out of rotation."""
        version = self.job.version
        applying = asyncio.ensure_future(together(s.finish(version) for s in self.servers))
        try:
            # Not cancelled with the publish: the servers are reading the tensors.
            await asyncio.shield(applying)
        except asyncio.CancelledError:
            # A moment more, then they count as lost.
            await asyncio.wait({applying}, timeout=self.job.patience_s)
            applying.cancel()
            for server in self.servers:
                if not server.done and not server.lost:
                    server.lose(f"it had not applied version {version} by the deadline")
            raise
        self.drop_lost()
        self._stall_s += time.perf_counter()

    async def undo(self, *, late: bool) -> None:
        self._plane.abandon()
        await together(server.undo() for server in self.servers)

    async def check(self) -> None:
        """Compares the servers' scores of the canary with the trainer's; one over the budget is out
        of rotation."""
        model, ours = self.job.model, self._scores
        if model is None or ours is None:
            return
        with self.job.times.timed("canary"):
            budget, over, worst = self.job.canary.budget(model), [], (0.0, 0.0)
            tokens = self.job.canary.prompt(model)
            asked = [self._scores_of(server, tokens) for server in self.servers]
            answers, _ = await asyncio.gather(
                asyncio.gather(*asked, return_exceptions=True),
                asyncio.gather(*(server.look_back() for server in self.servers)),
            )
        for server, theirs in zip(self.servers, answers, strict=True):
            if isinstance(theirs, UnreachableError):
                server.lose(f"it went away before the canary: {theirs}")
                continue
            if isinstance(theirs, BaseException):
                raise theirs
            gaps = differences(ours, theirs)
            if complaint := budget.complaint(*gaps):
                server.lose(
                    f"with version {self.job.version}, its log-probs of the canary {complaint}"
                )
                over.append(server.replica.describe())
            worst = max(worst, gaps)
        if over:
            raise PublishError(
                f"{'; '.join(over)}: is it the same model, in the same type? `ludic doctor` "
                "measures more"
            )
        self.drop_lost()
        self._gaps = {"canary_mean": worst[0], "canary_max": worst[1]}

    async def close(self) -> None:
        """Begins no more checks, and waits a moment for the threads: the trainer may change its
        weights afterwards. A shipment that takes longer is freed when it is made."""
        self._closed = True
        for check in (self._expected, self._checks):
            # `stage` has raised its error already, or nobody asked.
            check.add_done_callback(lambda check: check.cancelled() or check.exception())
        await asyncio.wait({self._checks, self._shipment}, timeout=self.job.patience_s)
        if self._shipment.done():
            await asyncio.to_thread(_free, self._shipment)
        else:
            self._shipment.add_done_callback(_free)

    def details(self) -> dict[str, Any]:
        times = self.job.times
        times.slowest((server.worker_seconds for server in self._every), prefix="worker_")
        return {"plane": self._plane.name, "stall_s": self._stall_s, **self._gaps}

    def _expect(self) -> dict[str, list[Any]]:
        """What a server's receipt has to say."""
        with self.job.times.timed("finite"):
            refuse_not_finite(self.job.tensors)
        if self._closed:
            return {}
        with self.job.times.timed("checksums"):
            return receipt(self.job.tensors.items())

    async def _check_own(self) -> None:
        await self._expected
        if self.job.model is not None and not self._closed:
            with self.job.times.timed("own_canary"):
                own_scores = self.job.canary.own_scores
                self._scores = await asyncio.to_thread(own_scores, self.job.model)

    def _prepare(self) -> Shipment:
        with self.job.times.timed("prepare"):
            return self._plane.prepare(self.job.tensors)

    async def _receive(self, shipment: Shipment) -> None:
        workers = sum(server.workers for server in self.servers)
        invitation = self._plane.invitation(workers, self.job.timeout_s)
        if invitation is not None:
            # Each server's workers come after those of the servers before it; the trainer is 0.
            first = accumulate((s.workers for s in self.servers[:-1]), initial=1)
            servers = zip(self.servers, first, strict=True)
            inviting = [server.invite(invitation, rank) for server, rank in servers]
            with self.job.times.timed("join"):
                await together([asyncio.to_thread(self._plane.join), *inviting])
        await self.each(lambda server: server.start())
        receiving = [server.receive(shipment.update) for server in self.servers]
        # A server that refuses ends this at once: nobody waits in a broadcast for it.
        moving = [] if shipment.move is None else [asyncio.to_thread(shipment.move)]
        await together([*receiving, *moving])
        self.drop_lost()
        expected = await asyncio.shield(self._expected)
        await self.each(lambda server: server.compare(expected))

    async def _scores_of(self, server: WeightsServer, tokens: tuple[int, ...]) -> list[float]:
        request = TokenCompletionRequest(
            server.model_name,
            tokens,
            SamplingConfig(max_tokens=1),
            ReturnSpec(logprobs=False, prompt_logprobs=True),
        )
        response = await self.job.client.ask_replica(server.replica, request)
        return [float(score) for score in response.info["prompt_logprobs"][1:]]


def _free(made: asyncio.Task[Shipment]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()
