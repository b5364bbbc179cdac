"""The stages of a run, from the state of its folder to its summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from ludic.agents.mcp import tool_servers
from ludic.errors import ConfigError, RolloutError
from ludic.eval import EvalReport
from ludic.plumbing.precision import float32_products
from ludic.rollouts.token_log import open_token_log
from ludic.runs.assemble import sft_algorithm
from ludic.runs.evaluation import evaluate_policy
from ludic.runs.execution.collecting import rare_collections
from ludic.runs.execution.conclusion import conclude, conclude_unmeasured
from ludic.runs.execution.following import follow
from ludic.runs.execution.gathered import HOW, samples
from ludic.runs.execution.interruption import interruptible
from ludic.runs.execution.pieces import RunPieces
from ludic.runs.execution.ranks import cold_start_copy
from ludic.runs.locate import how_to_go_on
from ludic.runs.model import precision_of
from ludic.runs.players.teacher import write_lessons
from ludic.runs.results.terminal import episodes_bar, say, warn
from ludic.runs.results.watch import (
    OUTCOME,
    REWARD,
    LearningWatch,
    doubtful,
    fallen,
    hacked,
    measured_alike,
)
from ludic.runs.storage.env_sources import note_env_sources
from ludic.runs.storage.folder import RunFolder
from ludic.runs.storage.lock import locked
from ludic.runs.storage.rollout_log import (
    keep_tokenizer,
    open_rollout_log,
    rollout_file,
    token_file,
)
from ludic.seeding import derive_seed
from ludic.training import (
    OfflineBatchSource,
    ReplayBufferSource,
    RolloutBatchSource,
    ScoredBatchSource,
    Trainer,
)

T = TypeVar("T")
BACKENDS = {"local": "in this process", "vllm": "by vLLM"}


class TrainingRun:
    """Carries a run out: evaluation, cold start, reinforcement, each followed by an evaluation.
    Stages that the folder shows as done are skipped."""

    def __init__(self, run: RunPieces) -> None:
        self.run, self.config = run, run.config
        self.seed = run.config.run.seed
        self.reports: dict[str, EvalReport] = {}
        self.stopped = False
        self._begun = False
        self._trainer: Trainer | None = None
        self._playing: asyncio.Task[Any] | None = None

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return self.run.folder

    async def go(self) -> None:
        """Runs the stages that are left, until the end or until Ctrl-C. If a new run fails before
        there is anything to keep, its folder is removed."""
        if self._begun:
            raise ConfigError(
                f"this run is over: resume it with ludic.resume({str(self.folder.path)!r})"
            )
        if not self.run.crew.world.leads:
            self._begun = True
            await follow(self.run)
            return
        async with self.run.crew.leading():
            if not self.run.resumed:
                self.folder.make(self.config, modules=self.run.modules)
            with locked(self.folder.path):
                self._begun = True
                if self.run.resumed:
                    self.folder.take_up(self.config)
                if (changed := note_env_sources(self.config, self.folder)) is not None:
                    warn(changed)
                try:
                    await self._go()
                except Exception:
                    if not self.run.resumed:
                        self.folder.abandon()
                    if self.folder.path.exists():
                        go_on = how_to_go_on(self.config, str(self.folder.path))
                        say(f"what the run has so far stays; resume it with: {go_on}")
                    raise

    async def _go(self) -> None:
        started = time.monotonic()
        say(f"run folder: {self.folder.path}")
        with interruptible(self.stop):
            async with self._opened():
                size = sum(p.numel() for p in self.run.model.parameters())
                ranks = self.run.crew.world.size
                backend = self._backend(ranks)
                sharded = f", sharded over {ranks} ranks" if ranks > 1 else ""
                name = self.config.model.name
                say(f"model: {name}, {size:,} parameters{sharded}; {backend}")
                for doubt in doubtful(self.config):
                    warn(doubt)
                await self._stages()
                if self.stopped:
                    resume = how_to_go_on(self.config, str(self.folder.path))
                    say(f"stopped; resume it with: {resume}")
                    return
                seconds = time.monotonic() - started
                if not samples(self.config):
                    conclude_unmeasured(self.config, self.folder, seconds, self.warnings())
                    return
                policy = self.run.policy
                await conclude(
                    self.config, self.folder, self.reports, policy, seconds, self.warnings()
                )

    def _backend(self, ranks: int) -> str:
        """How the policy is sampled from, in words."""
        if not samples(self.config):
            return "not sampled, since on several ranks a cold start needs no sampler"
        local = self.config.inference.backend == "local"
        how = HOW if ranks > 1 and local else BACKENDS[self.config.inference.backend]
        return f"sampled {how}"

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """Opens the run's client, and closes it at the end. From here on, pieces stay."""
        run = self.run
        async with AsyncExitStack() as stack:
            # Once for the whole run: its trainer and its engine, in two threads, ask for the same.
            stack.enter_context(float32_products(precision_of(self.config)))
            await stack.enter_async_context(tool_servers())
            stack.callback(run.close_loggers)
            if run.workers is not None:
                await stack.enter_async_context(run.workers)
            if self.config.inference.backend == "vllm" and "client" not in run._replaced:
                from ludic.runs.vllm_backend import open_vllm

                client, publisher = await open_vllm(
                    self.config, run.model, run.tokenizer, stack, self.folder.path
                )
                run.client = client
                if "publisher" not in run._replaced:
                    run.publisher = publisher
            elif hasattr(run.client, "__aenter__"):
                opened: Any = run.client
                await stack.enter_async_context(opened)
            await stack.enter_async_context(run.players)
            await stack.enter_async_context(run.scoring)
            run._frozen = "the run has begun"
            yield

    async def _stages(self) -> None:
        version = 0
        await self._evaluate("before")
        if self.config.sft is not None and self.config.sft.steps and not self.stopped:
            version = await self._sft()
            await self._evaluate("after_sft")
        if self.config.training.steps and not self.stopped:
            await self._reinforce(version)
            await self._evaluate("after_rl")

    def warnings(self) -> list[str]:
        """Says what is wrong with the run so far, each with the setting to look at."""
        fell, hack = fallen(self.config, self.reports), hacked(self.config, self.reports)
        signs = self.run.watch.standing()
        if fell:
            signs.pop(REWARD, None)  # the held-out episodes say it better
        if hack:
            signs.pop(OUTCOME, None)
        return [*doubtful(self.config), *fell, *hack, *signs.values()]

    def stop(self) -> None:
        """Lets the run end after the current step, with a checkpoint."""
        self.stopped = True
        if self._trainer is not None:
            self._trainer.stop()
        if self._playing is not None:
            self._playing.cancel()  # these episodes are cheap to play again

    async def _sft(self) -> int:
        """Trains the cold start; returns the policy's version after it."""
        sft, policy = self.config.sft, self.run.policy
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
        source = OfflineBatchSource(
            path,
            chat_template=policy.runtime.chat_template,
            algorithm=sft_algorithm(self.config),
            batch_size=sft.batch_size,
            seed=derive_seed(self.seed, "sft"),
            overlong="refuse" if sft.data is not None else "drop",
        )
        crew = self.run.crew
        async with crew.stage("sft", self.folder):
            with cold_start_copy(policy.model, crew) as model:
                trainer = self.run.sft_trainer(model, source)
                await self._train(trainer, trainer.train(sft.steps))
        return trainer.version

    async def _reinforce(self, version: int) -> None:
        training, run = self.config.training, self.run
        say(
            f"reinforcement: {training.steps} updates of {training.rollouts_per_update} episodes, "
            f"{run.algorithm.name}"
        )
        await asyncio.to_thread(run.scoring.take_start)
        async with (
            run.pipeline or nullcontext(),
            run.seating as seats,
            run.crew.stage("rl", self.folder, version),
        ):
            trainer, source = run.trainer, run.source
            trainer.optimizer.take_weights()  # it may be older than the cold start
            trainer.version = version
            await trainer.start()
            stage_before = self.reports.get("after_sft") or self.reports.get("before")
            alike = measured_alike(self.config, stage_before)
            self.run.watch = LearningWatch(self.config, alike, stage_before)
            self.run.watch.take_file(self.folder.metrics, trainer.step)
            async with AsyncExitStack() as stack:
                stack.enter_context(rare_collections())
                while isinstance(source, (ReplayBufferSource, ScoredBatchSource)):
                    source = source.source
                logging, log = self.config.logging, None
                file = rollout_file(self.folder.rollouts, "train")
                if logging.keep_rollouts and isinstance(source, RolloutBatchSource):
                    log = open_rollout_log(file, source.step)
                    source.engine.writer = await stack.enter_async_context(log)
                elif logging.keep_rollouts and run.pipeline and (over := run.pipeline.batches):
                    log = open_rollout_log(file, over.step, over.ledger.is_settled)
                    over.writer = await stack.enter_async_context(log)
                if logging.keep_tokens and log is not None:
                    keep_tokenizer(self.folder, run.tokenizer)
                    tokens = open_token_log(token_file(self.folder.rollouts), trainer.step)
                    trainer.token_log = stack.enter_context(tokens)
                await self._train(trainer, seats.train(trainer, training.steps))
                if run.pipeline and not self.stopped:
                    run.pipeline.finished()

    async def _train(self, trainer: Trainer, work: Coroutine[Any, Any, None]) -> None:
        self._trainer = trainer
        if self.stopped:
            trainer.stop()
        try:
            await work
        finally:
            trainer.close()
            self._trainer = None

    async def _evaluate(self, stage: str) -> None:
        """Plays the held-out episodes, unless the folder has their report already."""
        if self.folder.has(f"eval/{stage}.json"):
            self.reports[stage] = EvalReport.from_dict(self.folder.read_json(f"eval/{stage}.json"))
            return
        if self.stopped or not samples(self.config):
            return
        with episodes_bar(f"evaluation {stage.replace('_', ' ')}") as update:
            work = evaluate_policy(self.config, self.run.policy, name=stage, on_progress=update)
            report = await self._unless_stopped(work)
        if report is not None:
            if all(episode.error for episode in report.episodes):
                raise RolloutError(
                    f"every episode of the evaluation {stage.replace('_', ' ')} failed, the first "
                    f"with: {report.episodes[0].error}"
                )
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
