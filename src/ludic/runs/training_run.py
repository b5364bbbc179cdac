"""The stages of a run, from the state of its folder to its summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

from ludic.eval import EvalReport
from ludic.runs.assemble import (
    OpenPolicy,
    algorithm_of,
    open_policy,
    rollout_engine,
    trainer_config,
)
from ludic.runs.collecting import rare_collections
from ludic.runs.evaluation import evaluate_policy
from ludic.runs.interruption import interruptible
from ludic.runs.opponents import seating
from ludic.runs.results.conclusion import conclude
from ludic.runs.results.terminal import command_name, console, episodes_bar, say
from ludic.runs.settings import RunConfig
from ludic.runs.storage.folder import RunFolder
from ludic.runs.storage.rollout_log import open_rollout_log, rollout_file
from ludic.runs.teach import write_lessons
from ludic.seeding import derive_seed
from ludic.training import (
    BatchSource,
    OfflineBatchSource,
    RLAlgorithm,
    RolloutBatchSource,
    Trainer,
    make_algorithm,
)
from ludic.training.metrics.loggers import (
    ConsoleLogger,
    Logger,
    RichLiveLogger,
    TensorBoardLogger,
    WandbLogger,
)

T = TypeVar("T")
SHOWN = {
    "sft": ("train/nll", "perf/tokens_per_s"),
    "rl": ("train/reward_mean", "train/loss", "train/entropy", "perf/tokens_per_s"),
}
BACKENDS = {"local": "in this process", "vllm": "by vLLM"}


class TrainingRun:
    """Evaluation, cold start, reinforcement, each followed by an evaluation. Stages that the folder
    shows as done are skipped."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.seed = config.run.seed
        self.reports: dict[str, EvalReport] = {}
        self.stopped = False
        self._trainer: Trainer | None = None
        self._playing: asyncio.Task[Any] | None = None

    async def go(self) -> None:
        """Runs the stages that are left, until the end or until Ctrl-C."""
        started = time.monotonic()
        say(f"run folder: {self.folder.path}")
        with interruptible(self._stop):
            async with open_policy(self.config, folder=self.folder.path) as policy:
                size = sum(p.numel() for p in policy.model.parameters())
                backend = BACKENDS[self.config.inference.backend]
                say(f"model: {self.config.model.name}, {size:,} parameters; sampled {backend}")
                await self._stages(policy)
                if self.stopped:
                    say(f"stopped; go on with: {command_name()} train --resume {self.folder.path}")
                    return
                seconds = time.monotonic() - started
                await conclude(self.config, self.folder, self.reports, policy, seconds)

    async def _stages(self, policy: OpenPolicy) -> None:
        version = 0
        await self._evaluate(policy, "before")
        if self.config.sft is not None and self.config.sft.steps and not self.stopped:
            version = await self._sft(policy)
            await self._evaluate(policy, "after_sft")
        if self.config.training.steps and not self.stopped:
            await self._reinforce(policy, version)
            await self._evaluate(policy, "after_rl")

    def _stop(self) -> None:
        self.stopped = True
        if self._trainer is not None:
            self._trainer.stop()
        if self._playing is not None:
            self._playing.cancel()  # these episodes are cheap to play again

    async def _sft(self, policy: OpenPolicy) -> int:
        """Trains the cold start; returns the policy's version after it."""
        sft = self.config.sft
        assert sft is not None
        if sft.data is not None:
            path = Path(sft.data)
        else:
            path = rollout_file(self.folder.path, "sft")
            if not self.folder.has(path.name):
                await self._unless_stopped(write_lessons(self.config, policy.tokenizer, path))
                if self.stopped:
                    return 0
        say(f"supervised cold start: {sft.steps} steps on {path.name}")
        algorithm = make_algorithm("sft", aggregation=sft.aggregation)
        source = OfflineBatchSource(
            path,
            chat_template=policy.runtime.chat_template,
            algorithm=algorithm,
            batch_size=sft.batch_size,
            seed=derive_seed(self.seed, "sft"),
        )
        trainer = self._make_trainer(policy, "sft", algorithm, source, sft.steps)
        await self._train(trainer, trainer.train(sft.steps))
        return trainer.version

    async def _reinforce(self, policy: OpenPolicy, version: int) -> None:
        training, algorithm = self.config.training, algorithm_of(self.config)
        say(
            f"reinforcement: {training.steps} updates of {training.rollouts_per_update} episodes, "
            f"{algorithm.name}"
        )
        async with seating(self.config, policy, self.folder.path) as seats:
            seed = derive_seed(self.seed, "train")
            engine = rollout_engine(self.config, seats.runtime, seed=seed)
            source = RolloutBatchSource(
                engine=engine,
                request_fn=seats.curriculum,
                algorithm=algorithm,
                max_steps=training.max_steps,
                concurrency=training.concurrency,
                rollouts_per_update=training.rollouts_per_update,
            )
            trainer = self._make_trainer(policy, "rl", algorithm, source, training.steps)
            trainer.version = version
            await trainer.start()
            async with AsyncExitStack() as stack:
                stack.enter_context(rare_collections())
                if self.config.logging.keep_rollouts:
                    log = open_rollout_log(rollout_file(self.folder.rollouts, "train"), source.step)
                    engine.writer = await stack.enter_async_context(log)
                await self._train(trainer, seats.train(trainer, training.steps))

    def _make_trainer(
        self,
        policy: OpenPolicy,
        stage: Literal["sft", "rl"],
        algorithm: RLAlgorithm,
        source: BatchSource,
        steps: int,
    ) -> Trainer:
        return Trainer(
            model=policy.model,
            algo=algorithm,
            batch_source=source,
            publisher=policy.publisher,
            cfg=trainer_config(self.config, stage, self.folder.path),
            loggers=self._loggers(SHOWN[stage], steps),
            evaluate=(lambda step: self._during(policy, step)) if stage == "rl" else None,
        )

    async def _train(self, trainer: Trainer, work: Coroutine[Any, Any, None]) -> None:
        self._trainer = trainer
        if self.stopped:
            trainer.stop()
        try:
            await work
        finally:
            trainer.close()
            self._trainer = None

    def _loggers(self, keys: Sequence[str], steps: int) -> list[Logger]:
        loggers: list[Logger] = []
        for name in self.config.logging.loggers:
            if name == "live" and console.is_terminal:
                loggers.append(RichLiveLogger(keys, total_steps=steps, console=console))
            elif name in ("live", "console"):
                loggers.append(ConsoleLogger(keys, every=max(steps // 10, 1)))
            elif name == "wandb":
                loggers.append(WandbLogger())
            else:
                loggers.append(TensorBoardLogger(self.folder.path / "tensorboard"))
        return loggers

    async def _evaluate(self, policy: OpenPolicy, stage: str) -> None:
        """Plays the held-out episodes, unless the folder has their report already."""
        if self.folder.has(f"eval/{stage}.json"):
            self.reports[stage] = EvalReport.from_dict(self.folder.read_json(f"eval/{stage}.json"))
            return
        if self.stopped:
            return
        with episodes_bar(f"evaluation {stage.replace('_', ' ')}") as update:
            work = evaluate_policy(self.config, policy, name=stage, on_progress=update)
            report = await self._unless_stopped(work)
        if report is not None:
            self.folder.write_json(f"eval/{stage}.json", report.to_dict())
            self.reports[stage] = report

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns what `work` returns, or None if the run was stopped meanwhile."""
        self._playing = task = asyncio.create_task(work)
        try:
            return await task
        except asyncio.CancelledError:
            if not self.stopped:
                raise
            return None
        finally:
            self._playing = None

    async def _during(self, policy: OpenPolicy, step: int) -> dict[str, float]:
        report = await evaluate_policy(self.config, policy, name=f"step-{step}")
        self.folder.write_json(f"eval/step-{step}.json", report.to_dict())
        return report.metrics()
