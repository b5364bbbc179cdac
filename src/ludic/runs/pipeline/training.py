"""The trainer's side of a run over Redis: its server, its lease, its actors."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Self

from ludic.distributed import BackgroundPublisher, PolicyPublisher
from ludic.distributed.addresses import listening_address
from ludic.distributed.background import in_background
from ludic.distributed.shared_folders import OwnedFolder
from ludic.distributed.vllm.planes import HTTPPlane
from ludic.distributed.weights_http import PolicyServer
from ludic.errors import ConfigError, PipelineError
from ludic.inference import VLLMChatClient
from ludic.inference.client import ChatClient
from ludic.launch import Event, LocalEngine, Supervisor
from ludic.pipeline import (
    Bounds,
    LocalRedis,
    PipelineBatchSource,
    PipelinePublisher,
    PolicyFolder,
    TrainerLease,
)
from ludic.pipeline.status import read_status
from ludic.pipeline.weights_difference import DifferenceServer
from ludic.rollouts import Curriculum
from ludic.runs.model import sample_filter_of
from ludic.runs.pipeline import address
from ludic.runs.pipeline.roles import LAUNCHED, Environment, actor_role
from ludic.runs.pipeline.roster import ServerWatch
from ludic.runs.results.terminal import command_name, say, warn
from ludic.runs.settings import RunConfig
from ludic.training import RLAlgorithm
from ludic.workers.deadlines import ended

_LOOK_EVERY_S = 0.5
_SAY_EVERY_S = 60.0


class RunPipeline:
    """Entered: Redis, the trainer's lease and the actors are there; left, all have ended."""

    def __init__(self, config: RunConfig, folder: Path, client: Callable[[], ChatClient]) -> None:
        self.config, self.folder, self._client = config, folder, client
        self.section = address.section_of(config)
        self.batches: PipelineBatchSource | None = None
        self._redis: LocalRedis | None = None
        self._lease: TrainerLease | None = None
        self._policies: Path | None = None
        self._closing = ExitStack()
        self._policy_server: PolicyServer | None = None
        self._publisher: PolicyPublisher | None = None
        self._watch: ServerWatch | None = None
        self._actors = Supervisor(LocalEngine(), tell=self._tell)
        self._tending: asyncio.Task[None] | None = None
        self._failure: PipelineError | None = None
        self._ended: str | None = None

    @property
    def lease(self) -> TrainerLease:
        if self._lease is None:
            raise ConfigError("over Redis, source and trainer are made when the run starts")
        return self._lease

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self._open)
        except BaseException:
            await asyncio.to_thread(self._close)
            raise
        self._tending = asyncio.create_task(self._tend())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._tending is not None:
            await ended(self._tending)
        await asyncio.to_thread(self._close)

    def finished(self) -> None:
        """Lets the actors know, when they are left, that no more work will come."""
        self._ended = "its updates are done"

    def _open(self) -> None:
        section = self.section
        if address.starts_redis(section):
            self._redis = LocalRedis(self.folder / "redis")
            self._closing.enter_context(self._redis)
            self._closing.callback((self.folder / address.FILE).unlink, missing_ok=True)
        pipeline = address.find_pipeline(self.config, self.folder, own=self._redis)
        if self.config.inference.backend == "local":
            if section.policy_folder:
                self._policies = Path(section.policy_folder)
            elif self._redis is not None:  # all actors are on this host
                self._policies = self._closing.enter_context(closing(OwnedFolder())).path
            else:
                self._policies = self.folder / "policy"
            if self._redis is None:  # actors may join from other machines
                host, port = listening_address(section.policy_address, pipeline.url)
                self._policy_server = DifferenceServer(secrets.token_hex(32), host, port)
                self._closing.callback(self._policy_server.close)
        address.write_address(self.folder, pipeline)
        self._lease = TrainerLease(
            pipeline,
            lease_s=section.lease_s,
            fingerprint=address.fingerprint(self.config),
            max_bytes=section.max_bytes,
        )
        self._lease.acquire()
        inference = self.config.inference
        if inference.servers == "registered" and inference.publish_lora == "merged":
            self._watch = ServerWatch(self._lease.store)
        actors = 0 if os.environ.get(LAUNCHED) else section.actors
        for number in range(1, actors + 1):
            self._add_actor(number)
        self._actors.tick()
        where = "its own Redis" if self._redis is not None else pipeline.shown
        say(
            f"over {where}: {actors or 'the launched'} actors, one trainer; watch them with: "
            f"{command_name()} pipeline status {self.folder}"
        )

    def source(self, curriculum: Curriculum, algorithm: RLAlgorithm) -> PipelineBatchSource:
        """Returns the run's batches."""
        training, section = self.config.training, self.section
        source = PipelineBatchSource(
            lease=self.lease,
            request_fn=curriculum,
            algorithm=algorithm,
            rollouts_per_update=training.rollouts_per_update,
            checkpoint_every=training.checkpoint_every or max(training.steps, 1),
            max_steps=training.max_steps,
            sample_filter=sample_filter_of(self.config),
            lost_member="keep_partial" if training.lost_member == "keep_partial" else "drop_group",
            max_lag=training.max_lag,
            stale=section.stale,
            in_order=section.in_order,
            bounds=Bounds(section.max_groups, section.max_bytes),
            wait_s=training.batch_timeout_s,
        )
        source.alarm = self._alarm
        self.batches = source
        return source

    def publisher(self, inner: PolicyPublisher | None) -> PolicyPublisher:
        """Returns what also reaches the actors, in the background where `inner` lets it. One that
        shares the trainer's weights hears of each version at once."""
        self.lease.facts.append(lambda: {"weights_at": _address_of(inner)})
        folder = None if self._policies is None else PolicyFolder(self._policies)
        limit, server = self.config.training.publish_timeout_s, self._policy_server
        if inner is not None and inner.shares_weights:
            actors = PipelinePublisher(self.lease, None, folder, server, limit)
            self._publisher = BackgroundPublisher(actors, beside=inner, timeout_s=limit, held=True)
        else:
            actors = PipelinePublisher(self.lease, inner, folder, server, limit)
            self._publisher = in_background(actors, limit, held=True)
        return self._publisher

    def _alarm(self) -> None:
        """Raises where no batch would ever come."""
        if self._failure is not None:
            raise self._failure
        if isinstance(self._publisher, BackgroundPublisher):
            self._publisher.check()  # actors may wait for a version that will never come
        if self._tending is not None and self._tending.done() and not self._tending.cancelled():
            raise PipelineError(
                f"the task that watches the actors failed: {self._tending.exception()!r}"
            ) from self._tending.exception()
        if self._watch is not None and not self._publishes():
            self._watch.check()

    def _publishes(self) -> bool:
        publisher = self._publisher
        return isinstance(publisher, BackgroundPublisher) and publisher.is_publishing

    # Actors

    def _add_actor(self, number: int) -> None:
        client, servers, tokenizer = self._client(), [], None
        if isinstance(client, VLLMChatClient) and not self.config.inference.servers:
            servers = [replica.url for replica in client.replicas]
            tokenizer = self.folder / "vllm"
        url = {address.URL_VARIABLE: self.lease.config.url}
        environment = Environment(self.folder, variables=url)
        self._actors.add(actor_role(environment, number, servers=servers, tokenizer=tokenizer))

    async def _tend(self) -> None:
        """Starts actors again that ended by themselves, watches over the servers, and says how
        things stand."""
        reported = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._actors.tick()
            if self._watch is not None:
                await self._watch.look(self.lease.version, publishing=self._publishes())
            if time.monotonic() - reported > _SAY_EVERY_S:
                reported = time.monotonic()
                with suppress(PipelineError):
                    say(await asyncio.to_thread(lambda: read_status(self.lease.store).line()))

    def _tell(self, event: Event) -> None:
        if event.is_bad:
            warn(event.sentence)
        if event.is_last:
            self._failure = PipelineError(f"no actor is left: {event.sentence}")

    def _close(self) -> None:
        if self._lease is not None:
            self._lease.close(self._ended)
        self._actors.close()
        self._closing.close()


def _address_of(publisher: PolicyPublisher | None) -> str:
    """Where the machines of servers fetch weights, if that is how they get them."""
    plane = getattr(getattr(publisher, "payload", None), "plane", None)
    return plane.url if isinstance(plane, HTTPPlane) else ""
