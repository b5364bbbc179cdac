"""One run from its folder's state to its summary: evaluation, cold start, reinforcement."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ludic.runs.assemble import Policy, algorithm_of, open_policy, requests_of, trainer_config
from ludic.runs.evaluation import eval_engine, eval_plan, evaluate_policy
from ludic.runs.opponents import seating
from ludic.runs.rollout_log import open_rollout_log
from ludic.runs.settings import RunConfig
from ludic.runs.folder import RunFolder
from ludic.runs.show import (
    command_name,
    console,
    episode_text,
    episodes_bar,
    plot_png,
    plot_terminal,
    read_curve,
    say,
    stages_table,
    summary_of,
)
from ludic.runs.teach import write_lessons
from ludic.eval import EvalReport
from ludic.inference import HFChatTemplate
from ludic.rollouts import RolloutEngine
from ludic.seeding import derive_seed
from ludic.training import OfflineBatchSource, RolloutBatchSource, Trainer, make_algorithm
from ludic.training.metrics.loggers import ConsoleLogger, Logger, RichLiveLogger

T = TypeVar("T")
SHOWN = ("train/reward_mean", "train/loss", "train/entropy", "perf/tokens_per_s")


class TrainingRun:
    """One run from its folder's state to its summary. Every stage is skipped that is done."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.seed = config.run.seed
        self.requests = requests_of(config)
        self.reports: dict[str, EvalReport] = {}
        self.stopped = False
        self._trainer: Trainer | None = None
        self._playing: asyncio.Task[Any] | None = None

    async def go(self) -> None:
        started = time.monotonic()
        say(f"run folder: {self.folder.path}")
        with _interruptible(self._stop):
            async with open_policy(self.config, folder=self.folder.path) as policy:
                size = sum(p.numel() for p in policy.model.parameters())
                backend = {"local": "in this process", "vllm": "by vLLM"}
                say(
                    f"model: {self.config.model.name}, {size:,} parameters; sampled "
                    f"{backend[self.config.inference.backend]}"
                )
                await self._stages(policy)
                if self.stopped:
                    say(f"stopped; go on with: {command_name()} train --resume {self.folder.path}")
                    return
                await self._conclude(policy, time.monotonic() - started)

    async def _stages(self, policy: Policy) -> None:
        """What is left of the run, as far as it gets before it is stopped."""
        version = 0
        await self._evaluate(policy, "before")
        if self.config.sft is not None and self.config.sft.steps and not self.stopped:
            version = await self._sft(policy)
            await self._evaluate(policy, "after_sft")
        if self.config.training.steps and not self.stopped:
            await self._reinforce(policy, version)
            await self._evaluate(policy, "after_rl")

    def _stop(self) -> None:
        say("stopping after this step, with a checkpoint; press Ctrl-C again to end at once")
        self.stopped = True
        if self._trainer is not None:
            self._trainer.stop()
        if self._playing is not None:
            self._playing.cancel()  # these episodes are cheap to play again

    async def _sft(self, policy: Policy) -> int:
        sft = self.config.sft
        assert sft is not None
        if sft.data is not None:
            path = Path(sft.data)
        else:
            assert sft.teacher is not None
            path = self.folder.path / "sft.jsonl.gz"
            if not self.folder.has(path.name):
                await self._unless_stopped(self._teach(policy, sft.teacher, path))
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
        trainer = Trainer(
            model=policy.model,
            algo=algorithm,
            batch_source=source,
            publisher=policy.publisher,
            cfg=trainer_config(self.config, "sft", self.folder.path),
            loggers=self._loggers(("train/nll", "perf/tokens_per_s"), sft.steps),
        )
        await self._train(trainer, lambda: trainer.train(sft.steps))
        return trainer.version

    async def _teach(self, policy: Policy, teacher: str, path: Path) -> None:
        assert self.config.sft is not None
        template = policy.runtime.chat_template
        assert isinstance(template, HFChatTemplate)
        with episodes_bar(f"synthetic data by {teacher}") as update:
            await write_lessons(
                path,
                teacher,
                self.requests,
                template=template,
                inference=policy.runtime.inference,
                episodes=self.config.sft.examples,
                max_steps=self.config.training.max_steps,
                seed=derive_seed(self.seed, "lessons"),
                on_progress=update,
            )

    async def _reinforce(self, policy: Policy, version: int) -> None:
        training, algorithm = self.config.training, algorithm_of(self.config)
        say(
            f"reinforcement: {training.steps} updates of {training.rollouts_per_update} episodes, "
            f"{algorithm.name}"
        )
        async with seating(self.config, policy, self.folder.path) as seats:
            engine = RolloutEngine(runtime=seats.runtime, seed=derive_seed(self.seed, "train"))
            source = RolloutBatchSource(
                engine=engine,
                request_fn=seats.curriculum,
                algorithm=algorithm,
                max_steps=training.max_steps,
                concurrency=training.concurrency,
                rollouts_per_update=training.rollouts_per_update,
            )
            trainer = Trainer(
                model=policy.model,
                algo=algorithm,
                batch_source=source,
                publisher=policy.publisher,
                cfg=trainer_config(self.config, "rl", self.folder.path),
                loggers=self._loggers(SHOWN, training.steps),
                evaluate=lambda step: self._during(policy, step),
            )
            trainer.version = version
            await trainer.start()
            with ExitStack() as stack:
                if self.config.logging.keep_rollouts:
                    log = open_rollout_log(self.folder.rollouts / "train.jsonl.gz", source.step)
                    engine.writer = stack.enter_context(log)
                await self._train(trainer, lambda: seats.train(trainer, training.steps))

    async def _train(self, trainer: Trainer, work: Callable[[], Awaitable[None]]) -> None:
        self._trainer = trainer
        if self.stopped:
            trainer.stop()
        try:
            await work()
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
                from ludic.training.metrics.loggers import WandbLogger

                loggers.append(WandbLogger())
            else:
                from ludic.training.metrics.loggers import TensorBoardLogger

                loggers.append(TensorBoardLogger(self.folder.path / "tensorboard"))
        return loggers

    async def _evaluate(self, policy: Policy, stage: str) -> None:
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
        """What `work` gives; None where the run was stopped meanwhile."""
        self._playing = task = asyncio.create_task(work)
        try:
            return await task
        except asyncio.CancelledError:
            if not self.stopped:
                raise
            return None
        finally:
            self._playing = None

    async def _during(self, policy: Policy, step: int) -> dict[str, float]:
        report = await evaluate_policy(self.config, policy, name=f"step-{step}")
        self.folder.write_json(f"eval/step-{step}.json", report.to_dict())
        return report.metrics()

    async def _conclude(self, policy: Policy, seconds: float) -> None:
        outcomes = self.config.eval.outcomes
        headline = outcomes[0] if outcomes else None
        summary = {
            **summary_of(self.reports, headline),
            "seconds": round(seconds, 1),
            "seed": self.seed,
        }
        self.folder.write_json("summary.json", summary)
        for section in self.config.eval.env or self.config.env:
            options = ", ".join(f"{k}={v}" for k, v in section.kwargs.items())
            say(
                f"\n{section.kind} ({options}), {self.config.eval.episodes} held-out episodes, "
                "95 % intervals:\n"
            )
        console.print(stages_table(self.reports, outcomes))
        curve = read_curve(self.folder.metrics, "train/reward_mean")
        chart = plot_terminal(curve, "mean reward of the training episodes")
        if chart:
            console.print("\n" + chart)
        image = self.folder.path / "plot.png"
        drawn = plot_png(image, curve, summary)
        await self._show_an_episode(policy)
        say(
            f"\n{seconds:.0f} s. Everything is in {self.folder.path}/"
            + (" (plot.png, summary.json)" if drawn else " (summary.json)")
        )
        kind, path = self.config.env[0].kind, self.folder.path
        ludic = command_name()
        say(
            "\nTry next:\n"
            f"  {ludic} play {kind} --model {path}   watch it play\n"
            f"  {ludic} play {kind}   play yourself\n"
            f"  {ludic} eval {path} eval.episodes=1000   measure again\n"
            f"  {ludic} replay {path}/rollouts/train.jsonl.gz   run recorded episodes again\n"
            f"  {ludic} init my_env   begin an environment of your own"
        )

    async def _show_an_episode(self, policy: Policy) -> None:
        """One held-out episode again, a success if there is one, with all that was said."""
        stage, report = list(self.reports.items())[-1]
        index = next((i for i, e in enumerate(report.episodes) if e.success), 0)
        plan = eval_plan(self.config)
        chosen = plan[index * len(plan) // len(report.episodes)]
        rollouts = await eval_engine(self.config, policy).generate_rollouts(
            [chosen], max_steps=self.config.training.max_steps
        )
        say(f"\nOne episode {stage.replace('_', ' ')}:")
        say(episode_text(rollouts[0]))


@contextmanager
def _interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    pressed = False

    def on_interrupt() -> None:
        nonlocal pressed
        if pressed:
            os._exit(130)
        pressed = True
        stop()

    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except (NotImplementedError, RuntimeError):  # no signals in this thread or system
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
