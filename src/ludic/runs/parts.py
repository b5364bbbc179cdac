"""What a run is made of: parts that are made when first asked for, and replaced by assigning."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ludic.agents.mcp import tool_servers
from ludic.distributed import BroadcastPolicyPublisher, PolicyPublisher, Rank0OnlyPublisher
from ludic.distributed.background import in_background
from ludic.distributed.local import LocalCopyPublisher, LocalPolicyPublisher
from ludic.errors import ConfigError
from ludic.inference import LocalChatClient, VLLMChatClient
from ludic.inference.client import ChatClient
from ludic.interaction import Runtime
from ludic.memory.plan import Plan
from ludic.plumbing.given import bind_objects
from ludic.plumbing.precision import float32_products
from ludic.rollouts.processes import WorkerPool
from ludic.runs import episodes
from ludic.runs.memory import planned
from ludic.runs.model import (
    OnUpdate,
    algorithm_of,
    build_model,
    local_client,
    precision_of,
    sample_filter_of,
    sft_algorithm,
    trainer_config,
)
from ludic.runs.players.models import OtherPlayers
from ludic.runs.players.scoring import Scoring
from ludic.runs.players.seating import Seating
from ludic.runs.ranks import NoSampler, Ranks, gathered_copy, samples
from ludic.runs.results.terminal import LastingLogger, Stage, Update, make_loggers, warn
from ludic.runs.results.watch import LearningWatch
from ludic.runs.settings import RunConfig
from ludic.runs.storage import RunFolder
from ludic.seeding import derive_seed
from ludic.training import (
    BatchSource,
    DynamicSampling,
    ReplayBufferSource,
    RLAlgorithm,
    RolloutBatchSource,
    ScoredBatchSource,
    Trainer,
)
from ludic.training.metrics.loggers import Logger

if TYPE_CHECKING:
    from ludic.runs.pipeline.training import RunPipeline

T = TypeVar("T")


class Parts:
    """The parts made so far. It notices which were made from which: when one is assigned, those
    that were made from it are forgotten, to be made again, except for those assigned themselves."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._values: dict[str, Any] = {}
        self._assigned: set[str] = set()
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        self._being_made: list[str] = []
        self.frozen: str | None = None
        """Why none can be replaced any more."""

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Returns the part, made by `make` if it is not there yet."""
        if self._being_made:
            self._users[name].add(self._being_made[-1])
        if name not in self._values:
            self._being_made.append(name)
            try:
                with bind_objects(self._objects):
                    self._values[name] = make()
            finally:
                self._being_made.pop()
        return self._values[name]  # type: ignore[no-any-return]

    def assign(self, name: str, value: Any) -> None:
        """Replaces a part."""
        if self.frozen is not None:
            raise ConfigError(f"{name} cannot be replaced: {self.frozen}")
        self._forget_users(name)
        self._values[name] = value
        self._assigned.add(name)

    def is_assigned(self, name: str) -> bool:
        """Whether the part was assigned."""
        return name in self._assigned

    def _forget_users(self, name: str) -> None:
        for user in self._users.pop(name, set()) - self._assigned:
            self._values.pop(user, None)
            self._forget_users(user)


class Part(Generic[T]):
    """Decorates the method of a run that makes a part, which is then an attribute: made when it is
    first asked for, and replaced by assigning."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, run: RunParts | None, cls: type) -> T:
        if run is None:
            return self  # type: ignore[return-value]
        return run.parts.get(self._name, lambda: self._make(run))

    def __set__(self, run: RunParts, value: T) -> None:
        run.parts.assign(self._name, value)


class RunParts:
    """The parts of one run, by their names."""

    callbacks: list[Callable[[Update], object]]
    given: dict[str, Any]
    """The arguments that may hold Python objects, for those who resume the run."""
    modules: Path
    """The folder of the modules that the run may name."""
    resumed = False
    """Whether its folder was there before."""

    def __init__(
        self,
        config: RunConfig,
        objects: Mapping[str, Any],
        weights: Path | None = None,
        on_update: OnUpdate = "finish",
    ) -> None:
        self.config, self.objects = config, dict(objects)
        self._weights, self._on_update = weights, on_update
        self.given, self.callbacks = {}, []
        self.watch = LearningWatch(config)
        self.plan: Plan | None = None  # of the memory, once the model is loaded
        self.parts = Parts(self.objects)

    # The model, and what samples from it

    @Part
    def folder(self) -> RunFolder:
        return RunFolder.planned(self.config)

    @Part
    def ranks(self) -> Ranks:
        return Ranks.joined(self.config)

    @Part
    def loaded(self) -> tuple[torch.nn.Module, Any]:
        """The model and its tokenizer."""
        _ = self.ranks  # which say what this rank's GPU is
        return build_model(self.config, self._weights)

    @Part
    def model(self) -> torch.nn.Module:
        return self.loaded[0]

    @Part
    def tokenizer(self) -> Any:
        return self.loaded[1]

    @Part
    def client(self) -> ChatClient:
        if self.config.inference.backend != "local":
            raise ConfigError("with backend='vllm' the client is made when the run starts")
        several = self.ranks.several
        if several and not samples(self.config):
            return NoSampler()
        model = gathered_copy(self.model) if several else self.model
        return local_client(self.config, model, self.tokenizer, self._on_update)

    @Part
    def publisher(self) -> PolicyPublisher | None:
        client = self.client
        if isinstance(client, NoSampler):
            return None
        if isinstance(client, LocalChatClient):
            copied = self.ranks.several
            return LocalCopyPublisher(client) if copied else LocalPolicyPublisher(client)
        if isinstance(client, VLLMChatClient):
            return BroadcastPolicyPublisher(client)
        raise ConfigError(
            f"{type(client).__name__} needs a publisher for new weights: set run.publisher, "
            "to None if its weights never change"
        )

    @Part
    def players(self) -> OtherPlayers:
        return OtherPlayers(self.config, self.tokenizer)

    @Part
    def runtime(self) -> Runtime:
        return episodes.runtime_of(self.config, self.client, self.tokenizer, self.players.runtimes)

    @asynccontextmanager
    async def opened(self, folder: Path | None = None) -> AsyncIterator[None]:
        """Opens what samples from the model, and closes it at the end. From here on, parts stay.
        If a vLLM server has to be started, the model is saved for it in `folder`."""
        async with AsyncExitStack() as stack:
            # Once for the whole run: its trainer and its engine, in two threads, ask for the same.
            stack.enter_context(float32_products(precision_of(self.config)))
            await stack.enter_async_context(tool_servers())
            if self.config.inference.backend == "vllm" and not self.parts.is_assigned("client"):
                from ludic.runs.vllm_backend import open_vllm

                self.client, publisher = await open_vllm(
                    self.config, self.model, self.tokenizer, stack, folder, self.plan
                )
                if not self.parts.is_assigned("publisher"):
                    self.publisher = publisher
            elif isinstance(self.client, AbstractAsyncContextManager):
                await stack.enter_async_context(self.client)
            await stack.enter_async_context(self.players.opened())
            self.parts.frozen = "the run has begun"
            yield

    # What trains it

    @Part
    def algorithm(self) -> RLAlgorithm:
        return algorithm_of(self.config)

    @Part
    def seating(self) -> Seating:
        parts = (self.config, self.runtime, self.algorithm, self.model, self.tokenizer)
        return Seating.of(*parts, self.folder.path / "pool")

    @Part
    def scoring(self) -> Scoring:
        return Scoring(
            self.config, self.model, self.tokenizer, self.folder.path, sharded=self.ranks.several
        )

    @Part
    def pipeline(self) -> RunPipeline | None:
        if self.config.pipeline is None:
            return None
        from ludic.runs.pipeline.training import RunPipeline  # which needs the extra `redis`

        return RunPipeline(self.config, self.folder.path, lambda: self.client)

    @Part
    def workers(self) -> WorkerPool | None:
        processes = self.config.training.workers
        return WorkerPool(processes, imports=self.config.run.imports) if processes else None

    @Part
    def source(self) -> BatchSource:
        training, seed = self.config.training, derive_seed(self.config.run.seed, "train")
        source: BatchSource = (
            self.pipeline.source(self.seating.curriculum, self.algorithm)
            if self.pipeline
            else RolloutBatchSource(
                engine=episodes.rollout_engine(
                    self.config, self.seating.runtime, seed=seed, workers=self.workers
                ),
                request_fn=self.seating.curriculum,
                algorithm=self.algorithm,
                max_steps=training.max_steps,
                concurrency=self.config.concurrency,
                rollouts_per_update=training.rollouts_per_update,
                sample_filter=sample_filter_of(self.config),
                resample=DynamicSampling(rounds) if (rounds := training.dynamic_sampling) else None,
            )
        )
        if scorers := self.scoring.scorers:
            source = ScoredBatchSource(source, scorers)
        if (replay := training.replay_buffer) is not None:  # outside: what is stored has its scores
            source = ReplayBufferSource(source, **replay.model_dump(), seed=seed)
        return source

    @Part
    def loggers(self) -> list[Logger]:
        return make_loggers(self.config, self.folder, "rl")

    def loggers_of(self, stage: Stage) -> list[Logger]:
        """Returns the loggers of a stage: those that were assigned hear all of them."""
        if self.parts.is_assigned("loggers"):
            return [LastingLogger(logger) for logger in self.loggers]
        return self.loggers if stage == "rl" else make_loggers(self.config, self.folder, stage)

    @Part
    def trainer(self) -> Trainer:
        if self.ranks.several and self.parts.frozen is None:
            raise ConfigError("on several ranks the trainer is made when the run starts")
        source = self.source if self.ranks.world.leads else None
        return self._trainer_of("rl", self.model, self.algorithm, source)

    def sft_trainer(self, model: torch.nn.Module, source: BatchSource | None) -> Trainer:
        """Returns the trainer of the cold start; only rank 0 has a `source`."""
        algorithm = sft_algorithm(self.config) if source is None else None  # or the source's own
        return self._trainer_of("sft", model, algorithm, source)

    def _trainer_of(
        self,
        stage: Stage,
        model: torch.nn.Module,
        algorithm: RLAlgorithm | None,
        source: BatchSource | None,
    ) -> Trainer:
        leads = self.ranks.world.leads
        return Trainer(
            model=model,
            algo=algorithm,
            batch_source=source,
            publisher=self._publisher_of(stage),
            cfg=planned(trainer_config(self.config, stage, self.folder.path), self.plan),
            loggers=self.loggers_of(stage) if leads else (),
            mesh=self.ranks.mesh,
            evaluate=self._evaluate_during if stage == "rl" else None,
            tokenizer=copy.deepcopy(self.tokenizer) if leads else None,
            callbacks=[partial(self._updated, stage)] if leads else (),
        )

    def _publisher_of(self, stage: Stage) -> PolicyPublisher | None:
        """Returns what reaches all that sample in a stage, on rank 0; the others take part."""
        ranks = self.ranks
        if not ranks.world.leads:
            assigned = self.parts.is_assigned("publisher")
            published = self.publisher is not None if assigned else samples(self.config)
            return Rank0OnlyPublisher(None, ranks.world) if published else None
        publisher = self.publisher
        if stage == "rl" and self.pipeline is not None:
            publisher = self.pipeline.publisher(publisher)
        elif publisher is not None:
            publisher = in_background(publisher, self.config.training.publish_timeout_s, held=True)
        if ranks.several and publisher is not None:
            publisher = Rank0OnlyPublisher(publisher, ranks.world)
        return publisher

    async def _evaluate_during(self, step: int) -> dict[str, float]:
        """Plays the held-out episodes between two updates, and returns figures to log."""
        report = await episodes.evaluate_policy(self.config, self.runtime, name=f"step-{step}")
        self.folder.write_json(f"eval/step-{step}.json", report.to_dict())
        for sentence in self.watch.take_report(report):
            warn(f"update {step}: {sentence}")
        return report.metrics()

    async def _updated(self, stage: Stage, step: int, metrics: Mapping[str, float]) -> None:
        """Tells the callbacks of an update, and warns once of each sign that the reinforcement
        does not learn."""
        if stage == "rl":
            for sentence in self.watch.take(metrics):
                warn(f"update {step}: {sentence}")
        for callback in self.callbacks:
            if inspect.iscoroutine(told := callback(Update(stage, step, metrics))):
                await told
