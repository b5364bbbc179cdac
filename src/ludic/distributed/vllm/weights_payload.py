"""Publishes whole weights to live servers: staged while they sample, applied in a short pause."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from ludic.distributed.differences import apply_all, encode_all
from ludic.distributed.interfaces import Snapshot, Weights, named_tensors
from ludic.distributed.vllm.canary import Scores, differences
from ludic.distributed.vllm.checksums import receipt, refuse_not_finite
from ludic.distributed.vllm.delivery import Delivery, Job, Payload, now, together
from ludic.distributed.vllm.planes import DataPlane, Shipment
from ludic.distributed.vllm.shared_memory import SharedWeights
from ludic.distributed.vllm.weights_server import WeightsServer
from ludic.errors import ConfigError, PublishError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.http import UnreachableError
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.plumbing.cuda_streams import aside, wait_for

_log = logging.getLogger("ludic.distributed")


class Confirmed:
    """A copy, in this process's memory, of the weights that all servers confirmed last.

    One per publisher, used by one publish at a time. A publish that fails confirms nothing: where
    servers have staged it all the same, their copies have another name than `name`, and the next
    publish sends all weights.
    """

    def __init__(self) -> None:
        self.key = secrets.token_hex(16)
        """Names the publisher's copy on each host."""
        self.name: str | None = None
        self._tensors: dict[str, Tensor] = {}

    def name_for(self, version: int) -> str:
        """A name that no other publish has, not even another try of the same version."""
        return f"version {version}, {secrets.token_hex(4)}"

    def difference(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """What changed since; None: nothing was confirmed, or these are other tensors."""
        if self.name is None:
            return None
        try:
            return encode_all(self._tensors, tensors)
        except ValueError:  # the publisher was given another model
            return None

    def confirm(
        self, name: str, tensors: Mapping[str, Tensor], difference: Mapping[str, Tensor] | None
    ) -> None:
        """All servers have `tensors` now; `difference` is what they were sent, if not all."""
        self.name = None
        if difference is not None:
            apply_all(difference, self._tensors)
        else:
            self._tensors = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}
        self.name = name


class WeightsPayload(Payload):
    """All of a model's weights, over a data plane: None until the first publish has chosen it. With
    `differences`, what changed of them since the publish that all servers confirmed last."""

    def __init__(self, plane: DataPlane | None, *, differences: bool = False) -> None:
        self.plane = plane
        self._confirmed = Confirmed() if differences else None

    def gather(self, weights: Weights) -> dict[str, Tensor]:
        if isinstance(weights, SharedWeights):  # which know their file
            return weights
        tensors = {name: tensor.detach() for name, tensor in named_tensors(weights)}
        if not tensors:
            raise PublishError("there are no weights to publish")
        if not isinstance(weights, Snapshot):  # which is complete
            wait_for(tensors.values())
        return tensors

    def delivery(self, job: Job) -> Delivery[WeightsServer]:
        assert self.plane is not None
        if self._confirmed is not None and self.plane.name == "ipc":
            raise ConfigError(
                "differences=True with the plane ipc: servers read the trainer's own memory there, "
                "and nothing travels. Leave differences out, or choose another plane"
            )
        return WeightsDelivery(job, self.plane, self._confirmed)


class WeightsDelivery(Delivery[WeightsServer]):
    """One publish of weights.

    What runs at the same time: the trainer's checks (for NaN, then checksums, then its scores of
    the canary) and the plane's `prepare`, each in a thread, beside the servers' staging. All of
    them only read the tensors, and nobody writes meanwhile: they are a snapshot, or the trainer
    waits for the publish. Until they are paused, servers sample from their old weights; until they
    apply they have them still, and go on with them when anything fails. Nothing is applied before
    all checks are done.

    A difference is sent where every worker of every server says that its host's copy is what the
    difference was made against. Where one does not, or does not take it, or has something else
    afterwards, all weights follow.
    """

    def __init__(self, job: Job, plane: DataPlane, confirmed: Confirmed | None = None) -> None:
        limits = (job.timeout_s, job.patience_s)
        super().__init__(job, [WeightsServer(job.client, r, *limits) for r in job.client.replicas])
        self._every = self.servers
        self._plane, self._confirmed = plane, confirmed
        self._name = "" if confirmed is None else confirmed.name_for(job.version)
        self._difference: Mapping[str, Tensor] | None = None
        for server in self.servers:
            server.base = None if confirmed is None else confirmed.name
            server.joins = plane.joins
        self._closed = False
        self._scores: Scores | None = None
        self._expected = asyncio.create_task(asyncio.to_thread(self._expect))
        self._checks = asyncio.create_task(self._check_own())
        self._shipment = asyncio.create_task(asyncio.to_thread(self._prepare))
        self._stall_s = 0.0
        self._gaps: dict[str, float] = {}

    async def stage(self) -> None:
        """The servers take the tensors in and say what arrived, then pause."""
        # Shielded: a thread cannot be cancelled, and `close` waits for it.
        await together([self._bring(), asyncio.shield(self._checks)])
        self._stall_s = -time.perf_counter()
        await self.each(lambda server: server.pause())

    async def use(self) -> None:
        """Past this point a server that fails may have any weights: it is out of rotation."""
        version = self.job.version
        # Less a margin: a server must not go over when nobody waits for it any more.
        limit_s = max((self.job.ends_at - now()) * 0.9, 0.0)
        canary = None if self._scores is None else self._scores[0]
        finishing = (s.finish(version, limit_s, canary) for s in self.servers)
        applying = asyncio.ensure_future(together(finishing))
        try:
            # Not cancelled with the publish: the servers are reading the tensors.
            await asyncio.shield(applying)
        except asyncio.CancelledError:
            # A moment more, then they count as lost.
            await asyncio.wait({applying}, timeout=self.job.patience_s)
            applying.cancel()
            late = [s for s in self.servers if not s.done and not s.lost]
            for server in late:
                server.lose(f"it had not applied version {version} by the deadline", away=True)
            # Before the tensors are freed: none of them may go on by itself.
            await asyncio.shield(together(server.send_away() for server in late))
            raise
        self.drop_lost()
        own = [server.stall_s for server in self.servers if server.stall_s is not None]
        whole = len(own) == len(self.servers)
        self._stall_s = max(own) if whole else self._stall_s + time.perf_counter()
        if self._confirmed is not None:
            with self.job.times.timed("keep"):
                confirmed = (self._name, self.job.tensors, self._difference)
                await asyncio.to_thread(self._confirmed.confirm, *confirmed)

    async def undo(self, *, late: bool) -> None:
        self._plane.abandon()
        await together(server.undo() for server in self.servers)

    async def check(self) -> None:
        """Compares the servers' scores of the canary with the trainer's; one over the budget is out
        of rotation."""
        model = self.job.model
        if model is None or self._scores is None:
            return
        tokens, ours = self._scores
        with self.job.times.timed("canary"):
            budget, over, worst = self.job.canary.budget(model), [], (0.0, 0.0)
            asked = [self._scores_of(server, tokens) for server in self.servers]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        for server, theirs in zip(self.servers, answers, strict=True):
            if isinstance(theirs, UnreachableError):
                server.lose(f"it did not score the canary: {theirs}")
                server.away = await server.is_away(theirs)
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
        sent = "weights" if self._difference is None else "difference"
        return {"plane": self._plane.name, "sent": sent, "stall_s": self._stall_s, **self._gaps}

    @property
    def sent(self) -> Mapping[str, Tensor]:
        return self.job.tensors if self._difference is None else self._difference

    def _expect(self) -> dict[str, list[Any]]:
        """What a server's receipt has to say."""
        tensors = self.job.tensors
        with self.job.times.timed("finite"), aside(tensors.values()):
            refuse_not_finite(tensors)
        if self._closed:
            return {}
        with self.job.times.timed("checksums"), aside(tensors.values()):
            return receipt(tensors.items())

    async def _check_own(self) -> None:
        await self._expected
        if self.job.model is not None and not self._closed:
            with self.job.times.timed("own_canary"):
                self._scores = await self.job.canary.own_scores(self.job.model)

    def _prepare(self) -> Shipment:
        if self._confirmed is not None:
            with self.job.times.timed("encode"):
                self._difference = self._confirmed.difference(self.job.tensors)
        return self._ship()

    def _ship(self) -> Shipment:
        with self.job.times.timed("prepare"), aside(self.sent.values()):
            shipment = self._plane.prepare(self.sent)
            if self._confirmed is None:
                return shipment
            base = None if self._difference is None else self._confirmed.name
            copy = {"key": self._confirmed.key, "name": self._name, "base": base}
            return replace(shipment, update={**shipment.update, "copy": copy})

    async def _bring(self) -> None:
        """The servers stage the difference, or else all weights, and say what they have."""
        await together([self._join(), asyncio.shield(self._shipment)])
        shipment = self._shipment.result()
        if self._difference is not None:
            without = [server.replica.url for server in self.servers if not server.has_base]
            why = f"{', '.join(without)} did not confirm the version before"
            try:
                if not without:
                    await self._receive(shipment)
                    return
            except PublishError as exc:
                if self._expected.done() and self._expected.exception() is not None:
                    raise  # the trainer's weights are wrong, and would be so again
                why = str(exc)
                self._plane.abandon()
                self.drop_lost()
                await self._join()
            _log.warning("version %d goes out whole, since %s", self.job.version, why)
            self._difference = None
            # The servers' copies may be called by the old name, and be wrong.
            self._name = self._confirmed.name_for(self.job.version) if self._confirmed else ""
            await asyncio.to_thread(_free, self._shipment)
            self._shipment = asyncio.create_task(asyncio.to_thread(self._ship))
            shipment = await asyncio.shield(self._shipment)
        await self._receive(shipment)

    async def _join(self) -> None:
        """The servers join where the plane needs it."""
        workers = sum(server.workers for server in self.servers)
        invitation = self._plane.invitation(workers, self.job.timeout_s)
        if invitation is not None:
            # Each server's workers come after those of the servers before it; the trainer is 0.
            first = accumulate((s.workers for s in self.servers[:-1]), initial=1)
            servers = zip(self.servers, first, strict=True)
            inviting = [server.invite(invitation, rank) for server, rank in servers]
            with self.job.times.timed("join"):
                await together([asyncio.to_thread(self._plane.join), *inviting])

    async def _receive(self, shipment: Shipment) -> None:
        receiving = [server.receive(shipment.update) for server in self.servers]
        # A server that refuses ends this at once: nobody waits in a broadcast for it.
        moving = [] if shipment.move is None else [asyncio.to_thread(shipment.move)]
        await together([*receiving, *moving])
        self.drop_lost()
        expected = await asyncio.shield(self._expected)
        await self.each(lambda server: server.compare(expected))

    async def _scores_of(self, server: WeightsServer, tokens: tuple[int, ...]) -> list[float]:
        if (scores := await server.scores()) is not None:
            return scores
        request = TokenCompletionRequest(
            server.model_name,
            tokens,
            SamplingConfig(max_tokens=1),
            ReturnSpec(logprobs=False, prompt_logprobs=True),
        )
        asking = self.job.client.ask_replica(server.replica, request)
        response = await server.watched("the canary", asking)
        return [float(score) for score in response.info["prompt_logprobs"][1:]]


def _free(made: asyncio.Task[Shipment]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()
