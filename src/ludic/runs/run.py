"""A run: what it is made of. `stages` has what it does."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from ludic.runs.check import check_parts
from ludic.runs.interruption import blocking
from ludic.runs.locate import check_given
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
from ludic.runs.parts import Part, Parts
from ludic.runs.players.models import OtherPlayers
from ludic.runs.players.scoring import Scoring
from ludic.runs.players.seating import Seating
from ludic.runs.ranks import NoSampler, Ranks, gathered_copy, samples
from ludic.runs.results.report import RunReport
from ludic.runs.results.terminal import Stage, Update, loggers_of, make_loggers, warn
from ludic.runs.results.watch import LearningWatch
from ludic.runs.settings import RunConfig, find_run, override_key
from ludic.runs.settings.from_python import PARTS, given_again, read_arguments, script_folder
from ludic.runs.settings.reading import builtin_runs
from ludic.runs.stages import Stages
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


class Run:
    """One training run: evaluation, cold start, reinforcement, each followed by an evaluation.

    The arguments are the sections of a run file, each a dict or an object, and a few shortcuts:
    `parser`, `steps`, `learning_rate`, `seed`, `name` and `out`, the run folder to make. Where a
    run file names a part, an object will do. `Run(…)` checks and assembles, `go()` starts; between
    the two, `model`, `tokenizer`, `client`, `publisher`, `algorithm`, `source`, `trainer`,
    `loggers`, `callbacks` and `folder` can be looked at and replaced. A callback is called with
    an `Update` after every one, and awaited if it is async.
    """

    callbacks: list[Callable[[Update], object]]
    given: dict[str, Any]
    """The arguments that may hold Python objects, for those who resume the run."""
    resumed = False
    """Whether its folder was there before."""

    def __init__(
        self,
        env: Any,
        *,
        model: Any = None,
        algorithm: Any = None,
        parser: Any = None,
        steps: int | None = None,
        learning_rate: float | None = None,
        seed: int | None = None,
        name: str | None = None,
        out: str | Path | None = None,
        protocol: Any = None,
        reference: Any = None,
        teacher: Any = None,
        player: Any = None,
        curriculum: Any = None,
        training: Any = None,
        pipeline: Any = None,
        cluster: Any = None,
        inference: Any = None,
        eval: Any = None,
        sft: Any = None,
        logging: Any = None,
        run: Any = None,
        callbacks: Sequence[Callable[[Update], object]] = (),
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "out", "callbacks")}
        config, objects = read_arguments(arguments)
        self._assemble(config, objects, script_folder(), RunFolder.planned(config, out))
        self.callbacks = list(callbacks)
        self.given = {k: v for k, v in arguments.items() if v is not None and k in PARTS}

    @classmethod
    def from_file(
        cls,
        run: str | Path | None,
        overrides: Sequence[str] = (),
        *,
        out: str | Path | None = None,
        only_sft: bool = False,
    ) -> Run:
        """Assembles the run of a file, or a built-in one by name, with `section.key=value`
        overrides. With `only_sft` it must have a cold start, and ends after it."""
        if run is None:
            raise ConfigError(f"name a run file, or one of the built-in runs: {builtin_runs()}")
        if only_sft:
            overrides = [*overrides, "training.steps=0"]
        config, modules = find_run(str(run), overrides)
        if config.sft is None and only_sft:
            raise ConfigError(f"{run} has no cold start: add an [sft] table with a teacher or data")
        return cls.of_config(config, RunFolder.planned(config, out), modules)

    @classmethod
    def of_config(cls, config: RunConfig, folder: RunFolder, modules: Path) -> Run:
        """Assembles a checked configuration; `modules` is the folder of modules it may name."""
        self = cls.__new__(cls)
        self._assemble(config, {}, modules, folder)
        return self

    @classmethod
    def from_folder(cls, folder: str | Path, overrides: Sequence[str] = (), **parts: Any) -> Run:
        """Assembles what is left of the run in a folder. Only a few settings may change: with any
        other it would be another run. `parts` are those that were objects of a script."""
        opened = RunFolder.open(folder)
        free = {"training.steps", "training.checkpoint_every", "training.rank_timeout_s"}
        free.add("logging.loggers")
        if opened.config().training.past_opponents:
            free.remove("training.checkpoint_every")  # it also says when a past opponent is taken
        for key in map(override_key, overrides):
            if key not in free and not key.startswith("cluster"):
                raise ConfigError(
                    f"{key} cannot change when a run is resumed: start a new run, or change only "
                    f"{', '.join(sorted(free))}"
                )
        config = opened.config(overrides)
        self = cls.__new__(cls)
        self._assemble(config, given_again(config, parts), opened.modules, opened)
        self.given, self.resumed = parts, True
        return self

    @classmethod
    @asynccontextmanager
    async def open_policy(
        cls, config: RunConfig, *, weights: Path | None = None, on_update: OnUpdate = "finish"
    ) -> AsyncIterator[Run]:
        """Yields a run that is not trained, for its model: with the weights of a checkpoint, and
        with its client and publisher open. `on_update` is the in-process client's."""
        self = cls.__new__(cls)
        self._set(config, {}, weights)
        self._on_update = on_update
        self.ranks = Ranks()
        async with self.opened():
            yield self

    def _assemble(
        self, config: RunConfig, objects: Mapping[str, Any], modules: Path, folder: RunFolder
    ) -> None:
        self._set(config, objects, None)
        self.modules, self.folder = modules, folder
        with bind_objects(self.objects):
            episodes.import_user_modules(config, modules)
            check_given(config, str(folder.path))
            check_parts(config)

    def _set(self, config: RunConfig, objects: Mapping[str, Any], weights: Path | None) -> None:
        self.config, self.objects, self._weights = config, dict(objects), weights
        self._on_update: OnUpdate = "finish"
        self.given, self.callbacks = {}, []
        self.watch = LearningWatch(config)
        self.plan: Plan | None = None  # of the memory, once the model is loaded
        self.parts = Parts(self.objects)
        self._stages = Stages(self)
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.folder.path)!r})"

    # Starting and stopping

    def go(self) -> Run:
        """Trains to the end, or until `stop()` or Ctrl-C. Works where an event loop is running,
        too, as in a notebook: the run then has a thread of its own."""
        blocking(self.go_async, on_interrupt=self.stop)
        return self

    async def go_async(self) -> Run:
        """`go` for callers in an event loop."""
        self._loop = asyncio.get_running_loop()
        with bind_objects(self.objects):
            await self._stages.go()
        return self

    def stop(self) -> None:
        """Ends the run after the current step, with a checkpoint. Any thread may call it."""
        loop, stages = self._loop, self._stages
        if loop is not None and loop.is_running() and loop is not asyncio._get_running_loop():
            loop.call_soon_threadsafe(stages.stop)
        else:
            stages.stop()

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped before its end."""
        return self._stages.stopped

    @property
    def report(self) -> RunReport:
        """What the evaluations found, before and after each stage, with intervals."""
        stages, outcomes = self._stages, tuple(self.config.eval.outcomes)
        return RunReport(stages.reports, outcomes, tuple(stages.warnings()))

    def read_reports(self) -> None:
        """Takes the reports that the folder has, of a run that another process trained."""
        self._stages.read_reports()

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
            raise ConfigError("with inference.backend='vllm' there is a client once the run goes")
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
            f"{type(client).__name__} needs a publisher that gives it new weights: set "
            "run.publisher, to None if it takes none"
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

    @Part
    def trainer(self) -> Trainer:
        if self.ranks.several and self.parts.frozen is None:
            raise ConfigError("on several ranks there is a trainer once the run goes")
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
            loggers=loggers_of(self, stage) if leads else (),
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
