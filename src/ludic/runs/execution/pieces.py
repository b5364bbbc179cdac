"""The pieces of a run: model, client, publisher, players, source, trainer and the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludic.distributed import BroadcastPolicyPublisher, PolicyPublisher, Rank0OnlyPublisher
from ludic.distributed.local import LocalCopyPublisher, LocalPolicyPublisher
from ludic.errors import ConfigError
from ludic.inference import LocalChatClient, VLLMChatClient
from ludic.inference.client import ChatClient
from ludic.interaction import Runtime
from ludic.rollouts.processes import WorkerPool
from ludic.runs.assemble import (
    OpenPolicy,
    algorithm_of,
    sample_filter_of,
    sft_algorithm,
    trainer_config,
)
from ludic.runs.episodes import inference_spec, rollout_engine, runtime_of
from ludic.runs.evaluation import evaluate_policy
from ludic.runs.execution.gathered import NoSampler, gathered_copy, samples
from ludic.runs.execution.piece import Piece
from ludic.runs.execution.ranks import Crew
from ludic.runs.execution.updates import LastingLogger, Stage, Update, make_loggers
from ludic.runs.model import build_model, local_client
from ludic.runs.players.opponents import Seating, seating
from ludic.runs.players.scoring import Scoring
from ludic.runs.players.seats import OtherPlayers
from ludic.runs.results.terminal import warn
from ludic.runs.results.watch import LearningWatch
from ludic.runs.settings import RunConfig
from ludic.runs.storage.folder import RunFolder
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
from ludic.training.trainer import Evaluate

if TYPE_CHECKING:
    from ludic.runs.pipeline.training import RunPipeline


class RunPieces:
    """What a run is made of, as its configuration says. Each piece is built when it is first asked
    for; one that is replaced takes those with it that were built from it."""

    def __init__(
        self,
        config: RunConfig,
        objects: Mapping[str, Any],
        modules: Path,
        folder: RunFolder,
        *,
        resumed: bool = False,
    ) -> None:
        self.config, self.objects, self.modules = config, dict(objects), modules
        self.resumed = resumed
        self.callbacks: list[Callable[[Update], object]] = []
        self.watch = LearningWatch(config)
        self._built: dict[str, Any] = {"folder": folder}
        self._replaced: set[str] = set()
        self._frozen: str | None = None

    def _load(self) -> tuple[torch.nn.Module, Any]:
        _ = self.crew  # which says what this rank's GPU is
        if self.config.run.threads is not None:
            torch.set_num_threads(self.config.run.threads)
        return build_model(self.config)

    def _make_client(self) -> ChatClient:
        if self.config.inference.backend == "local":
            if not samples(self.config):
                return NoSampler()
            model = gathered_copy(self.model) if self.crew.several else self.model
            return local_client(self.config, model, self.tokenizer)
        raise ConfigError("with inference.backend='vllm' there is a client once the run goes")

    def _make_publisher(self) -> PolicyPublisher | None:
        client = self.client
        if isinstance(client, NoSampler):
            return None
        if isinstance(client, LocalChatClient):
            copied = self.crew.several
            return LocalCopyPublisher(client) if copied else LocalPolicyPublisher(client)
        if isinstance(client, VLLMChatClient):
            return BroadcastPolicyPublisher(client)
        raise ConfigError(
            f"{type(client).__name__} needs a publisher that gives it new weights: set "
            "run.publisher, to None if it takes none"
        )

    def _make_source(self) -> BatchSource:
        training, seed = self.config.training, derive_seed(self.config.run.seed, "train")
        source: BatchSource = (
            self.pipeline.source(self.seating.curriculum, self.algorithm)
            if self.pipeline
            else RolloutBatchSource(
                engine=rollout_engine(
                    self.config, self.seating.runtime, seed=seed, workers=self.workers
                ),
                request_fn=self.seating.curriculum,
                algorithm=self.algorithm,
                max_steps=training.max_steps,
                concurrency=training.concurrency,
                rollouts_per_update=training.rollouts_per_update,
                sample_filter=sample_filter_of(self.config),
                resample=DynamicSampling(rounds) if (rounds := training.dynamic_sampling) else None,
            )
        )
        if scorers := self.scoring.scorers:
            source = ScoredBatchSource(source, scorers)
        if (replay := training.replay_buffer) is not None:  # outside: what is stored has its scores
            source = ReplayBufferSource(
                source,
                share=replay.share,
                max_age=replay.max_age,
                half_life=replay.half_life,
                seed=seed,
            )
        return source

    def _make_workers(self) -> WorkerPool | None:
        processes = self.config.training.workers
        return WorkerPool(processes, imports=self.config.run.imports) if processes else None

    def _make_pipeline(self) -> RunPipeline | None:
        if self.config.pipeline is None:
            return None
        from ludic.runs.pipeline.training import RunPipeline  # which needs the extra `redis`

        return RunPipeline(self.config, self.folder.path, lambda: self.client)

    def _make_trainer(self) -> Trainer:
        if self.crew.several and self._frozen is None:
            raise ConfigError("on several ranks there is a trainer once the run goes")
        source = self.source if self.crew.world.leads else None
        return self._trainer_of("rl", self.model, self.algorithm, source, self._evaluate_during)

    async def _evaluate_during(self, step: int) -> dict[str, float]:
        """Plays the held-out episodes between two updates, and returns figures to log."""
        report = await evaluate_policy(self.config, self.policy, name=f"step-{step}")
        self.folder.write_json(f"eval/step-{step}.json", report.to_dict())
        for sentence in self.watch.take_report(report):
            warn(f"update {step}: {sentence}")
        return report.metrics()

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
        evaluate: Evaluate | None = None,
    ) -> Trainer:
        cfg = trainer_config(self.config, stage, self.folder.path)
        if not self.crew.world.leads:
            replaced = "publisher" in self._replaced
            published = self.publisher is not None if replaced else samples(self.config)
            return Trainer(
                model=model,
                algo=algorithm,
                batch_source=None,
                publisher=Rank0OnlyPublisher(None, self.crew.world) if published else None,
                cfg=cfg,
                mesh=self.crew.mesh,
                evaluate=evaluate,
            )
        publisher, rl = self.publisher, stage == "rl"
        if rl and self.pipeline is not None:
            publisher = self.pipeline.publisher(publisher)
        if self.crew.several and publisher is not None:
            publisher = Rank0OnlyPublisher(publisher, self.crew.world)
        return Trainer(
            model=model,
            algo=algorithm,
            batch_source=source,
            publisher=publisher,
            cfg=cfg,
            loggers=self._loggers_of(stage),
            mesh=self.crew.mesh,
            evaluate=evaluate,
            tokenizer=copy.deepcopy(self.tokenizer),
            callbacks=[lambda step, metrics: self.updated(Update(stage, step, metrics))],
        )

    def _loggers_of(self, stage: Stage) -> list[Logger]:
        """Returns the loggers of a stage: those that were put in hear all of them."""
        if "loggers" in self._replaced:
            return [LastingLogger(logger) for logger in self.loggers]
        return self.loggers if stage == "rl" else make_loggers(self.config, self.folder, stage)

    def close_loggers(self) -> None:
        """Closes those that were put in; a trainer closes those of its stage."""
        for logger in self.loggers if "loggers" in self._replaced else ():
            try:
                logger.close()
            except Exception as exc:
                warn(f"{type(logger).__name__} could not be closed: {type(exc).__name__}: {exc}")

    crew: Piece[Crew] = Piece(lambda run: Crew.assembled(run.config))
    folder: Piece[RunFolder] = Piece(lambda run: RunFolder.planned(run.config))
    _loaded: Piece[tuple[torch.nn.Module, Any]] = Piece(lambda run: run._load())
    model: Piece[torch.nn.Module] = Piece(lambda run: run._loaded[0], "_loaded")
    tokenizer: Piece[Any] = Piece(lambda run: run._loaded[1], "_loaded")
    client: Piece[ChatClient] = Piece(lambda run: run._make_client(), "model", "tokenizer")
    publisher: Piece[PolicyPublisher | None] = Piece(lambda run: run._make_publisher(), "client")
    players: Piece[OtherPlayers] = Piece(
        lambda run: OtherPlayers(
            run.config, run.tokenizer, inference_spec(run.config, trained_on=False)
        ),
        "tokenizer",
    )
    runtime: Piece[Runtime] = Piece(
        lambda run: runtime_of(run.config, run.client, run.tokenizer, run.players.runtimes),
        *("client", "tokenizer", "players"),
    )
    algorithm: Piece[RLAlgorithm] = Piece(lambda run: algorithm_of(run.config))
    seating: Piece[Seating] = Piece(
        lambda run: seating(run.config, run, run.folder.path),
        *("model", "tokenizer", "runtime", "algorithm", "folder"),
    )
    scoring: Piece[Scoring] = Piece(
        lambda run: Scoring(
            run.config, run.model, run.tokenizer, run.folder.path, sharded=run.crew.several
        ),
        *("model", "tokenizer", "folder"),
    )
    pipeline: Piece[RunPipeline | None] = Piece(lambda run: run._make_pipeline(), "folder")
    workers: Piece[WorkerPool | None] = Piece(lambda run: run._make_workers())
    source: Piece[BatchSource] = Piece(
        lambda run: run._make_source(), "seating", "scoring", "algorithm", "pipeline", "workers"
    )
    loggers: Piece[list[Logger]] = Piece(
        lambda run: make_loggers(run.config, run.folder, "rl"), "folder"
    )
    trainer: Piece[Trainer] = Piece(
        lambda run: run._make_trainer(),
        *("model", "algorithm", "source", "publisher", "loggers", "tokenizer", "folder"),
    )

    @property
    def policy(self) -> OpenPolicy:
        """The model, and what samples from it and publishes to it."""
        return OpenPolicy(self.model, self.tokenizer, self.runtime, self.publisher)

    def updated(self, update: Update) -> None:
        """Tells the callbacks of an update, and warns once of each sign that the reinforcement
        does not learn."""
        if update.stage == "rl":
            for sentence in self.watch.take(update.metrics):
                warn(f"update {update.step}: {sentence}")
        for callback in self.callbacks:
            callback(update)
