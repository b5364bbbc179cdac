"""What a run does, in order: from the state of its folder to its summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from ludic.errors import ConfigError, RolloutError
from ludic.eval import EvalReport
from ludic.rollouts.token_log import open_token_log
from ludic.runs.episodes import evaluate_policy
from ludic.runs.following import cold_start_copy, follow
from ludic.runs.interruption import interruptible, rare_collections
from ludic.runs.locate import how_to_resume
from ludic.runs.memory import plan_loaded, try_plan
from ludic.runs.model import sft_algorithm
from ludic.runs.parts import RunParts
from ludic.runs.players.teacher import write_lessons
from ludic.runs.ranks import describe_model, samples
from ludic.runs.results import watch
from ludic.runs.results.report import conclude, conclude_unmeasured
from ludic.runs.results.terminal import close_loggers, episodes_bar, say, warn
from ludic.runs.storage import (
    EVALUATIONS,
    keep_tokenizer,
    locked,
    note_env_sources,
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
from ludic.training.batching.self_play import SelfPlay

T = TypeVar("T")


class Stages:
    """Takes a run through its stages: evaluation, cold start, RL, each followed by an
    evaluation. Those that the folder shows to have finished are skipped."""

    def __init__(self, run: RunParts) -> None:
        self.run, self.config = run, run.config
        self.reports: dict[str, EvalReport] = {}
        self.stopped = False
        self._begun = False
        self._trainer: Trainer | None = None
        self._playing: asyncio.Task[Any] | None = None
        self._doubts: list[str] = []

    async def go(self) -> None:
        """Runs the stages that are left, until the end or until Ctrl-C. If a new run fails before
        there is anything to keep, its folder is removed."""
        run, config, folder = self.run, self.config, self.run.folder
        if self._begun:
            raise ConfigError(f"this run is over: resume it by ludic.resume({str(folder.path)!r})")
        if not run.ranks.world.leads:
            self._begun = True
            await follow(run)
            return
        async with run.ranks.leading():
            if not run.resumed:
                folder.make(config, modules=run.modules)
            with locked(folder.path):
                self._begun = True
                if run.resumed:
                    folder.take_up(config)
                if (changed := note_env_sources(config, folder)) is not None:
                    warn(changed)
                try:
                    await self._lead()
                except Exception:
                    if not run.resumed:
                        folder.abandon()
                    if folder.path.exists():
                        say(f"the run folder is kept; {how_to_resume(config, folder.path)}")
                    raise

    async def _lead(self) -> None:
        """What rank 0 does, or a process alone."""
        run, config, started = self.run, self.config, time.monotonic()
        say(f"run folder: {run.folder.path}")
        with interruptible(self.stop):
            run.plan = await asyncio.to_thread(plan_loaded, config, run.model)
            async with self.opened():
                say(f"model: {config.model.name}, {describe_model(config, run.model, run.ranks)}")
                template = run.runtime.chat_template
                self._doubts = watch.doubtful(config, run.model, template)
                for doubt in self._doubts:
                    warn(doubt)
                if run.plan is not None:
                    await asyncio.to_thread(try_plan, config, run.model, run.plan)
                await self._all()
                seconds, warnings = time.monotonic() - started, self.warnings()
                if self.stopped:
                    say(f"stopped; {how_to_resume(config, run.folder.path)}")
                elif samples(config):
                    await conclude(config, run.folder, self.reports, run.runtime, seconds, warnings)
                else:
                    conclude_unmeasured(config, run.folder, seconds, warnings)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Opens what the run samples, scores and plays with, and closes it at the end."""
        run = self.run
        async with AsyncExitStack() as stack:
            if run.parts.is_assigned("loggers"):  # else each stage has its own, and closes them
                stack.callback(close_loggers, run.loggers)
            if run.workers is not None:
                await stack.enter_async_context(run.workers)
            await stack.enter_async_context(run.opened(run.folder.path))
            await stack.enter_async_context(run.scoring.opened())
            yield

    async def _all(self) -> None:
        version = 0
        await self._evaluate("before")
        if self.config.sft is not None and self.config.sft.steps and not self.stopped:
            version = await self._sft()
            await self._evaluate("after_sft")
        if self.config.training.steps and not self.stopped:
            await self.reinforce(version)
            await self._evaluate("after_rl")

    def warnings(self) -> list[str]:
        """Says what is wrong with the run so far, each with the setting to look at."""
        config, reports = self.config, self.reports
        fell, hack = watch.fallen(config, reports), watch.hacked(config, reports)
        signs = self.run.watch.standing()
        if fell:
            signs.pop(watch.REWARD, None)  # the held-out episodes say it better
        if hack:
            signs.pop(watch.OUTCOME, None)
        return [*self._doubts, *fell, *hack, *signs.values()]

    def stop(self) -> None:
        """Lets the run end after the current step, with a checkpoint."""
        self.stopped = True
        if self._trainer is not None:
            self._trainer.stop()
        if self._playing is not None:
            self._playing.cancel()  # these episodes are cheap to play again

    async def _sft(self) -> int:
        """Trains the cold start; returns the policy's version after it."""
        sft, run = self.config.sft, self.run
        assert sft is not None
        path = rollout_file(run.folder.path, "sft") if sft.data is None else Path(sft.data)
        if sft.data is None and not run.folder.has(path.name):
            await self._unless_stopped(write_lessons(self.config, run.tokenizer, path))
            if self.stopped:
                return 0
        say(f"supervised cold start: {sft.steps} steps on {path.name}")
        source = OfflineBatchSource(
            path,
            chat_template=run.runtime.chat_template,
            algorithm=sft_algorithm(self.config),
            batch_size=sft.batch_size,
            seed=derive_seed(self.config.run.seed, "sft"),
            overlong="refuse" if sft.data is not None else "drop",
        )
        async with run.ranks.stage("sft", run.folder):
            with cold_start_copy(run.model, run.ranks) as model:
                trainer = run.sft_trainer(model, source)
                await self._train(trainer, trainer.train(sft.steps))
        return trainer.version

    async def reinforce(self, version: int) -> None:
        """Trains with RL, from this version of the policy on."""
        training, run = self.config.training, self.run
        updates = f"{training.steps} updates of {training.rollouts_per_update} episodes"
        say(f"RL: {updates}, {run.algorithm.name}")
        await asyncio.to_thread(run.scoring.take_start)
        async with (
            run.pipeline or nullcontext(),
            run.seating.pool or nullcontext(),
            run.ranks.stage("rl", run.folder, version),
        ):
            trainer = run.trainer
            trainer.version = version
            await trainer.start()
            stage_before = self.reports.get("after_sft") or self.reports.get("before")
            alike = watch.measured_alike(self.config, stage_before)
            run.watch = watch.LearningWatch(self.config, alike, stage_before)
            run.watch.take_file(run.folder.metrics, trainer.step)
            async with AsyncExitStack() as stack:
                stack.enter_context(rare_collections())
                await self._keep_episodes(trainer, stack)
                await self._train(trainer, self._update(trainer, training.steps))
                if run.pipeline and not self.stopped:
                    run.pipeline.finished()

    async def _keep_episodes(self, trainer: Trainer, stack: AsyncExitStack) -> None:
        """Has the stage's rollouts and tokens written to the folder, as far as the run says so."""
        run, folder, logging = self.run, self.run.folder, self.config.logging
        if not logging.keep_rollouts:
            return
        source, file = run.source, rollout_file(folder.rollouts, "train")
        while isinstance(source, (ReplayBufferSource, ScoredBatchSource)):
            source = source.source
        if isinstance(source, RolloutBatchSource):
            log = open_rollout_log(file, source.step)
            source.engine.writer = await stack.enter_async_context(log)
        elif run.pipeline and (over := run.pipeline.batches):
            log = open_rollout_log(file, over.step, over.ledger.is_settled)
            over.writer = await stack.enter_async_context(log)
        else:
            return
        if logging.keep_tokens:
            keep_tokenizer(folder, run.tokenizer)
            tokens = open_token_log(token_file(folder.rollouts), trainer.step)
            trainer.token_log = stack.enter_context(tokens)

    async def _update(self, trainer: Trainer, steps: int) -> None:
        """Trains up to `steps` in all; a pool of past policies is refreshed on the way."""
        seating = self.run.seating
        if (pool := seating.pool) is None:
            await trainer.train(steps)
            return
        assert isinstance(seating.curriculum, SelfPlay)
        goal = 0
        while goal < steps and trainer.step >= goal:
            # Where a checkpoint has steps already, this only counts them as done.
            if trainer.step < min(due := pool.next_due(goal), steps):
                seating.curriculum.slots = await pool.bring_to(trainer.step)
            await trainer.train(min(due, steps) - goal)
            goal = min(due, steps)

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
        self.read_reports()
        if stage in self.reports or self.stopped or not samples(self.config):
            return
        title = f"evaluation {stage.replace('_', ' ')}"
        with episodes_bar(title) as update:
            work = evaluate_policy(self.config, self.run.runtime, name=stage, on_progress=update)
            report = await self._unless_stopped(work)
        if report is None:
            return
        if all(episode.error for episode in report.episodes):
            first = report.episodes[0].error
            raise RolloutError(f"every episode of the {title} failed, the first with: {first}")
        self.run.folder.write_json(f"eval/{stage}.json", report.to_dict())
        self.reports[stage] = report

    def read_reports(self) -> None:
        """Takes the reports of the stages that the folder shows to have finished."""
        for stage in EVALUATIONS:
            if self.run.folder.has(file := f"eval/{stage}.json"):
                self.reports[stage] = EvalReport.from_dict(self.run.folder.read_json(file))

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
