"""A run in a script: assembled from its arguments, looked at, changed, started."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ludic.distributed import BroadcastPolicyPublisher, PolicyPublisher, Rank0OnlyPublisher
from ludic.distributed.local import LocalPolicyPublisher
from ludic.errors import ConfigError
from ludic.given import in_use, is_given
from ludic.inference import LocalChatClient, VLLMChatClient
from ludic.inference.client import ChatClient
from ludic.interaction import Runtime
from ludic.lazy import resolve
from ludic.registry import ENVS
from ludic.runs.assemble import (
    OpenPolicy,
    algorithm_of,
    bring_in,
    inference_spec,
    local_client,
    rollout_engine,
    runtime_of,
    sample_filter_of,
    sft_algorithm,
    trainer_config,
)
from ludic.runs.check import check_parts
from ludic.runs.interruption import blocking
from ludic.runs.locate import builtin_runs, check_given, find_run
from ludic.runs.model import build_model
from ludic.runs.pieces import Piece
from ludic.runs.pipeline.training import RunPipeline
from ludic.runs.players.opponents import Seating, seating
from ludic.runs.players.scoring import Scoring
from ludic.runs.players.seats import OtherPlayers
from ludic.runs.ranks import Crew
from ludic.runs.results.report import RunReport
from ludic.runs.settings import RunConfig, check_run, override_key
from ludic.runs.settings.from_python import Tables, at, given_names
from ludic.runs.settings.paths import resolve_paths
from ludic.runs.storage.folder import RunFolder
from ludic.runs.training_run import Stage, TrainingRun, Update, make_loggers
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

PARTS = (
    *("env", "model", "algorithm", "parser", "protocol", "reference", "teacher", "player"),
    *("training", "sft", "eval"),
)


class Run:
    """One training run: evaluation, cold start, reinforcement, each followed by an evaluation.

    The arguments are the sections of a run file, each a dict or an object, and a few shortcuts:
    `parser`, `steps`, `learning_rate`, `seed`, `name` and `out`, the run folder to make. Where a
    run file names a part, an object will do. `Run(…)` checks and assembles, `go()` starts; between
    the two, `model`, `tokenizer`, `client`, `publisher`, `algorithm`, `source`, `trainer`,
    `loggers`, `callbacks` and `folder` can be looked at and replaced. A callback is called with
    an `Update` after every one.
    """

    callbacks: list[Callable[[Update], object]]
    parts: dict[str, Any]

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
        self.parts = {k: v for k, v in arguments.items() if v is not None and k in PARTS}

    def _assemble(
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
        self.callbacks, self.parts = [], {}
        self._built: dict[str, Any] = {"folder": folder}
        self._replaced: set[str] = set()
        self._frozen: str | None = None
        self._stages: TrainingRun | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        with in_use(self.objects):
            bring_in(config, modules)
            check_given(config, str(folder.path))
            check_parts(config)

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
        found = RunFolder.open(folder)
        free = {"training.steps", "training.checkpoint_every", "training.rank_timeout_s"}
        free.add("logging.loggers")
        if found.config().training.past_opponents:
            free.remove("training.checkpoint_every")  # it also says when a past opponent is taken
        for key in map(override_key, overrides):
            if key not in free:
                raise ConfigError(
                    f"{key} cannot change when a run is resumed: start a new run, or change only "
                    f"{', '.join(sorted(free))}"
                )
        config = found.config(overrides)
        self = cls.__new__(cls)
        self._assemble(config, given_again(config, parts), found.modules, found, resumed=True)
        self.parts = parts
        return self

    # The pieces

    def _load(self) -> tuple[torch.nn.Module, Any]:
        _ = self.crew  # which says what this rank's GPU is
        if self.config.run.threads is not None:
            torch.set_num_threads(self.config.run.threads)
        return build_model(self.config)

    def _make_client(self) -> ChatClient:
        if self.config.inference.backend == "local":
            return local_client(self.config, self.model, self.tokenizer)
        raise ConfigError("with inference.backend='vllm' there is a client once the run goes")

    def _make_publisher(self) -> PolicyPublisher | None:
        client = self.client
        if isinstance(client, LocalChatClient):
            return LocalPolicyPublisher(client)
        if isinstance(client, VLLMChatClient):
            return BroadcastPolicyPublisher(client)
        raise ConfigError(
            f"{type(client).__name__} needs a publisher that gives it new weights: set "
            "run.publisher, to None if it takes none"
        )

    def _make_source(self) -> BatchSource:
        training, seed = self.config.training, derive_seed(self.config.run.seed, "train")
        source: BatchSource = (
            self.pipeline.source()
            if self.pipeline
            else RolloutBatchSource(
                engine=rollout_engine(self.config, self.seating.runtime, seed=seed),
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

    def _make_trainer(self) -> Trainer:
        if self.crew.several and self._frozen is None:
            raise ConfigError("on several ranks there is a trainer once the run goes")
        source = self.source if self.crew.world.leads else None
        evaluate = TrainingRun.of(self).evaluate_during
        return self._trainer_of("rl", self.model, self.algorithm, source, evaluate)

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
            published = "publisher" not in self._replaced or self.publisher is not None
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
            loggers=self.loggers if rl else make_loggers(self.config, self.folder, stage),
            mesh=self.crew.mesh,
            evaluate=evaluate,
            tokenizer=copy.deepcopy(self.tokenizer),
            callbacks=[lambda step, metrics: self.updated(Update(stage, step, metrics))],
        )

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
    pipeline: Piece[RunPipeline | None] = Piece(
        lambda run: RunPipeline(run) if run.config.pipeline is not None else None, "folder"
    )
    source: Piece[BatchSource] = Piece(
        lambda run: run._make_source(), "seating", "scoring", "algorithm", "pipeline"
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
        """Tells the callbacks of an update."""
        TrainingRun.of(self).updated(update)
        for callback in self.callbacks:
            callback(update)

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
        stages = TrainingRun.of(self)
        self._loop = asyncio.get_running_loop()
        with in_use(self.objects):
            await stages.go()
        return self

    def stop(self) -> None:
        """Ends the run after the current step, with a checkpoint. Any thread may call it."""
        loop, stages = self._loop, TrainingRun.of(self)
        if loop is not None and loop.is_running() and loop is not asyncio._get_running_loop():
            loop.call_soon_threadsafe(stages.stop)
        else:
            stages.stop()

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped before its end."""
        return TrainingRun.of(self).stopped

    @property
    def report(self) -> RunReport:
        """What the evaluations found, before and after each stage, with intervals."""
        stages = TrainingRun.of(self)
        outcomes = tuple(self.config.eval.outcomes)
        return RunReport(stages.reports, outcomes, tuple(stages.warnings()))


def read_arguments(arguments: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """Returns the configuration that a run's arguments stand for, and the objects among them."""
    tables = Tables()
    tables.put(**arguments)
    resolve_paths(tables.data, Path.cwd())
    return check_run(tables.data, source="the run"), tables.objects


def given_again(config: RunConfig, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects of a recorded run by their recorded names, from parts that are given
    again where they stood."""
    for name in parts:
        if name not in PARTS:
            raise ConfigError(
                f"{name}= cannot be given here: the run has it in its folder; give only parts that "
                f"were Python objects ({', '.join(PARTS)})"
            )
    tables = Tables()
    tables.put(**parts)
    found: dict[str, Any] = {}
    recorded = config.plain()
    for path, name in given_names(recorded).items():
        again = at(tables.data, path)
        if again is None:
            continue  # whoever goes on without it says so
        if is_given(again):
            found[name] = tables.objects[again]
        elif isinstance(again, str) and (":" in again or path.startswith(("env.", "eval.env."))):
            found[name] = resolve(again) if ":" in again else ENVS.get(again)
        else:
            raise ConfigError(f"{path} was a Python object: give it again, and not {again!r}")
    return found


def script_folder() -> Path:
    """Returns the folder of the running script, whose modules a run may name; in a notebook, the
    working directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()
