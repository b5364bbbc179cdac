"""Whole weights to live servers: staged while they sample, applied in a short pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ludic.distributed.interfaces import Weights, named_tensors
from ludic.distributed.vllm.canary import differences
from ludic.distributed.vllm.checksums import receipt, refuse_not_finite
from ludic.distributed.vllm.delivery import Delivery, Job, Payload, PublishTimes, together
from ludic.distributed.vllm.placement import PlaneName
from ludic.distributed.vllm.planes import DataPlane, Shipment, make_plane, plane_for
from ludic.distributed.vllm.weights_server import WeightsServer
from ludic.errors import PublishError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.http import UnreachableError
from ludic.inference.sampling import ReturnSpec, SamplingConfig


class TrainerChecks:
    """Looks for NaN, computes checksums, then the canary's scores, in that order.

    It runs in a thread beside the servers' staging. That is safe since nobody writes meanwhile: the
    trainer steps only when its publish has ended, the servers read a copy or the same tensors, and
    nothing is applied before `done` has ended well.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        scores: Callable[[], list[float]] | None,
        times: PublishTimes,
    ) -> None:
        self._tensors, self._score, self._times = tensors, scores, times
        self._wanted = True
        self.scores: list[float] | None = None
        self._expected = asyncio.create_task(asyncio.to_thread(self._expect))
        self._all = asyncio.create_task(self._run())

    # A thread cannot be cancelled: the tasks are shielded, so that `stop` can wait for their end.

    async def expected(self) -> dict[str, list[Any]]:
        """What a server's receipt has to say."""
        return await asyncio.shield(self._expected)

    async def done(self) -> None:
        """Returns when everything is known; raises what was wrong."""
        await asyncio.shield(self._all)

    async def stop(self, seconds: float) -> None:
        """Begins nothing more, and waits for what is under way, at most so long: the trainer may
        change its weights afterwards."""
        self._wanted = False
        for work in (self._expected, self._all):
            # `done` has raised its error already, or nobody asked.
            work.add_done_callback(lambda work: work.cancelled() or work.exception())
        await asyncio.wait({self._all}, timeout=seconds)

    async def _run(self) -> None:
        await self._expected
        if self._wanted and self._score is not None:
            with self._times.timed("own_canary"):
                self.scores = await asyncio.to_thread(self._score)

    def _expect(self) -> dict[str, list[Any]]:
        self._look_for_nan()
        return self._compute_expected() if self._wanted else {}

    def _look_for_nan(self) -> None:
        with self._times.timed("finite"):
            refuse_not_finite(self._tensors)

    def _compute_expected(self) -> dict[str, list[Any]]:
        with self._times.timed("checksums"):
            return receipt(self._tensors.items())


class WeightsPayload(Payload):
    """All of a model's weights, over a data plane."""

    def __init__(self, plane: PlaneName | DataPlane) -> None:
        named = isinstance(plane, str) and plane != "auto"
        self._plane: str | DataPlane = make_plane(str(plane)) if named else plane

    def gather(self, weights: Weights) -> dict[str, Tensor]:
        tensors = {name: tensor.detach() for name, tensor in named_tensors(weights)}
        if not tensors:
            raise PublishError("there are no weights to publish")
        return tensors

    def delivery(self, job: Job) -> Delivery[WeightsServer]:
        if isinstance(self._plane, str):
            self._plane = plane_for(job.tensors)
        return WeightsDelivery(job, self._plane)


class WeightsDelivery(Delivery[WeightsServer]):
    """One publish of weights.

    What runs at the same time: the trainer's checks and the plane's `prepare`, each in a thread,
    beside the servers' staging. All of them only read the tensors. Until they are paused, servers
    sample from their old weights; until they apply they have them still, and go on with them when
    anything fails.
    """

    def __init__(self, job: Job, plane: DataPlane) -> None:
        limits = (job.timeout_s, job.patience_s)
        super().__init__(job, [WeightsServer(job.client, r, *limits) for r in job.client.replicas])
        self._every = self.servers
        self._plane = plane
        scores = None if job.model is None else partial(job.canary.own_scores, job.model)
        self._checks = TrainerChecks(job.tensors, scores, job.times)
        self._shipment = asyncio.create_task(asyncio.to_thread(self._prepare))
        self._stall_s = 0.0
        self._gaps: dict[str, float] = {}

    async def stage(self) -> None:
        """The servers take the tensors in and say what arrived, then pause."""
        # Shielded, here and in the checks: a thread cannot be cancelled, and `close` waits for it.
        shipment = await asyncio.shield(self._shipment)
        await together([self._receive(shipment), self._checks.done()])
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
        model, ours = self.job.model, self._checks.scores
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
        """Waits a moment for the threads. A shipment that takes longer is freed when it is made."""
        wait_s = self.job.patience_s
        await asyncio.gather(
            self._checks.stop(wait_s), asyncio.wait({self._shipment}, timeout=wait_s)
        )
        if self._shipment.done():
            await asyncio.to_thread(_free, self._shipment)
        else:
            self._shipment.add_done_callback(_free)

    def details(self) -> dict[str, Any]:
        times = self.job.times
        times.slowest((server.worker_seconds for server in self._every), prefix="worker_")
        return {"plane": self._plane.name, "stall_s": self._stall_s, **self._gaps}

    def _prepare(self) -> Shipment:
        with self.job.times.timed("prepare"):
            return self._plane.prepare(self.job.tensors)

    async def _receive(self, shipment: Shipment) -> None:
        workers = sum(server.workers for server in self.servers)
        invitation = self._plane.invitation(workers, self.job.timeout_s)
        if invitation is not None:
            inviting = [s.invite(invitation, rank) for s, rank in _first_ranks(self.servers)]
            with self.job.times.timed("join"):
                await together([asyncio.to_thread(self._plane.join), *inviting])
        await self.each(lambda server: server.start())
        receiving = [server.receive(shipment.update) for server in self.servers]
        # A server that refuses ends this at once: nobody waits in a broadcast for it.
        moving = [] if shipment.move is None else [asyncio.to_thread(shipment.move)]
        await together([*receiving, *moving])
        self.drop_lost()
        expected = await self._checks.expected()
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


def _first_ranks(servers: list[WeightsServer]) -> Iterator[tuple[WeightsServer, int]]:
    """Each server with the rank of its first worker; the trainer's is 0."""
    rank = 1
    for server in servers:
        yield server, rank
        rank += server.workers
