"""The training loop: take a batch, pack it, accumulate gradients, step, publish, save, log."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from ludic.distributed.deadlines import limit_of
from ludic.distributed.interfaces import PolicyPublisher
from ludic.errors import ConfigError, NonFiniteError, OutOfMemoryError, TrainingError
from ludic.plumbing.precision import check_precision, float32_products
from ludic.rollouts.token_log import TokenLog
from ludic.saw.items import SAWBatch
from ludic.sharding.weights import ModelWeights
from ludic.sharding.world import World, work_on
from ludic.training.algorithm import RLAlgorithm, Stateful, one_algorithm
from ludic.training.batching.ahead import SamplingAhead, check_scored
from ludic.training.batching.source import (
    BatchesEnded,
    GivesBatches,
    Intake,
    PolicyLostError,
    as_source,
)
from ludic.training.checkpoint import Checkpointer
from ludic.training.checkpoint_contents import TrainerState
from ludic.training.config import TrainerConfig, curve, describe_change, learning_rate
from ludic.training.metrics.loggers import Logger, MetricLog
from ludic.training.metrics.stats import (
    PerfMeter,
    PublishLog,
    StatBuffer,
    Workload,
    batch_metrics,
    over_steps,
)
from ludic.training.types import Evaluates
from ludic.training.update.budget import filled_in
from ludic.training.update.checks import check_loss, check_packing, check_split
from ludic.training.update.host_optimizer import make_optimizer
from ludic.training.update.optimizer import clipped
from ludic.training.update.passes import Passes, mini_batches
from ludic.training.update.planning import attention_cost
from ludic.training.update.policy import Policy
from ludic.training.update.scores import ScoreRecord, mean_kl
from ludic.workers.deadlines import bounded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("ludic.training")
T = TypeVar("T")
_MOST_LOSSES = 50
"""How often a policy is published again for one batch."""
Metrics = dict[str, float]
Evaluate = Callable[[int], Awaitable[Mapping[str, float]]]


class Trainer:
    """Optimises `model` on the batches of `batch_source`, with the loss of `algo`.

    It knows nothing about episodes or rewards, only batches of state, action and weight. `algo` may
    be left out if the source has one. With a `mesh` the model is sharded over its ranks (FSDP2);
    batches then come from rank 0's source, and only rank 0 publishes and logs. `stateful` are other
    objects to save with every checkpoint. A `tokenizer` is saved beside every saved model.
    `callbacks` are called after every step, with its number and its metrics, and awaited if they
    are async, but not the tasks that they return. A `token_log` gets the weight, log-prob and
    entropy of every trained token.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        algo: RLAlgorithm | None = None,
        batch_source: GivesBatches | None,
        publisher: PolicyPublisher | None = None,
        cfg: TrainerConfig | None = None,
        loggers: Sequence[Logger] = (),
        mesh: DeviceMesh | None = None,
        init_from: str | None = None,
        evaluate: Evaluate | Evaluates | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        tokenizer: Any = None,
        callbacks: Sequence[Callable[[int, Metrics], object]] = (),
        token_log: TokenLog | None = None,
    ) -> None:
        self.cfg = cfg = filled_in(cfg or TrainerConfig(), model, mesh)
        source = None if batch_source is None else as_source(batch_source)
        self._algo = algo = one_algorithm(algo, source.algorithm if source else None)
        self._source_name = type(batch_source).__name__  # for errors: not that of a wrapper
        if cfg.overlap and source is not None and not source.works_ahead:
            source = SamplingAhead(source, self._published)
        if source is not None:
            check_scored(source, model, cfg)
        self.model, self.source, self.publisher = model, source, publisher
        check_precision(cfg.precision, model, "TrainerConfig")
        check_loss(algo.loss, model)
        self.policy = Policy(model, cfg, graphs=cfg.graphs and mesh is None)
        cost = attention_cost(model)
        device = next(model.parameters()).device
        if device.type != "meta":
            check_split(model, device)
        if mesh is not None:
            from ludic.sharding.fsdp import load_sharded, shard_policy

            shard_policy(self.policy, mesh)
            if init_from is not None:
                load_sharded(model, init_from, torch.device(mesh.device_type))
        elif init_from is not None:
            raise ConfigError("init_from is for sharded models: pass a mesh, or load the weights")
        self.world = World.of(mesh, next(model.parameters()).device)
        with float32_products(cfg.precision):
            check_packing(self.policy, self.world.device, cfg.max_seq_len)
        if self.world.leads and source is None:
            raise ConfigError("rank 0 needs a batch source")
        if self.world.size > 1 and source and source.works_ahead and not cfg.overlap:
            raise ConfigError("on several ranks a source that works ahead needs overlap=True")
        self.optimizer = make_optimizer(model.named_parameters(), cfg)
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self.passes = Passes(self.policy, algo.loss, cfg, self.world, cost)
        self.step = self.version = self.nonfinite_steps = 0
        self.evaluate, self.callbacks, self.token_log = evaluate, callbacks, token_log
        self._logs_tokens: bool | None = None
        self.log = MetricLog(loggers, cfg.run_dir, algo.name, writes=self.world.leads)
        self.perf = PerfMeter(model, self.world)
        self._stateful: dict[str, Stateful] = {**(stateful or {}), "algorithm": algo}
        if source is not None:
            self._stateful["batch_source"] = source
        self._checkpoints = (
            Checkpointer(cfg.checkpoint, self.world, tokenizer) if cfg.checkpoint else None
        )
        if hasattr(publisher, "state_dict"):
            self._stateful["publisher"] = cast("Stateful", publisher)
        self._publish_log = PublishLog()
        self._compute = ThreadPoolExecutor(
            1, "ludic-train", initializer=work_on, initargs=(self.world.device,)
        )
        self.intake = Intake(algo, self.world, self._run, self._source_name, cfg, self._published)
        self._saving_s = 0.0  # time of the previous save, logged with the next step
        self._states_before_ahead: dict[str, Any] | None = None
        self._asked = self._taken = 0  # steps in this process; a resumed `step` may be ahead
        self._goal: int | None = 0
        self._started = self._stopping = self._moved = False
        self._unpublished = False  # a `train` that failed dropped what was on its way

    @property
    def algo(self) -> RLAlgorithm:
        """Not to be replaced: the source assigns credit with it, and the passes have its loss."""
        return self._algo

    def train_sync(self, num_steps: int | None = None) -> None:
        """`train` for callers without an event loop."""
        if asyncio._get_running_loop() is not None:
            raise ConfigError("an event loop is already running: use `await trainer.train(...)`")
        asyncio.run(self.train(num_steps))

    async def train(self, num_steps: int | None = None) -> None:
        """Trains for `num_steps` more steps; without a number, until there are no more batches.

        Steps in a resumed checkpoint count as done: a script that is run again continues where it
        stopped, and trains as many steps in total as one that was never interrupted.
        """
        await self.start()
        self._asked = max(self._asked, self._taken) + (num_steps or 0)
        self._goal = self._asked if num_steps is not None else None
        try:
            with suppress(BatchesEnded):
                while await self._goes_on():
                    await self.train_step()
            if self._checkpoints and self._checkpoints.last_step != self.step:
                await self._save()
            await self._for_all(self._published())
        except BaseException:
            self._unpublished = self.publisher is not None  # it is abandoned below
            raise
        finally:
            if self.source is not None:
                await self.source.drop_ahead()
            if self.publisher is not None:
                await self.publisher.abandon()
            if self._checkpoints is not None:
                await self._run(self._checkpoints.finish)

    async def _goes_on(self) -> bool:
        """Whether there is another step. Rank 0 says so for all: only there `stop` counts."""
        on = not self._stopping and (self._goal is None or self.step < self._goal)
        if self.world.size > 1:
            on = bool((await self._run(self.world.share, {"on": on}))["on"])
        return on

    def stop(self) -> None:
        """Lets `train` end after the current step, with a checkpoint if checkpoints are on. On
        several ranks, rank 0 has to be told."""
        self._stopping = True

    async def start(self) -> None:
        """Resumes from a checkpoint if there is one, and publishes the trainer's weights: again
        after a `train` that failed."""
        if self._started and not self._unpublished:
            return
        if self._checkpoints is not None and not self._started:
            await self._run(self._resume)
        await self._publish()
        await self._for_all(self._published())
        self._started, self._unpublished = True, False

    async def train_step(self) -> Metrics:
        """One batch: as many optimizer steps as the settings say, one publish, one log line.

        Raises `StopAsyncIteration` where the batch source has no more, and only there.
        """
        try:
            return await self._train_step()
        except BatchesEnded:
            raise
        except StopAsyncIteration as exc:
            raise TrainingError(
                f"StopAsyncIteration({exc}) in the middle of a step, not from the batch source: an "
                "evaluation, a callback or another part of the run called `anext` on an iterator "
                "that has ended. Catch it there, or give `anext` a default"
            ) from exc

    async def _train_step(self) -> Metrics:
        await self.start()
        self._check_trained()
        await self._run(self.optimizer.follow_weights)
        clock = self.perf.clock()
        self._states_before_ahead = None
        batch = await self._next_batch()
        clock.lap("perf/wait_for_batch_s")
        last = self._goal is not None and self.step + 1 >= self._goal
        if self.source is not None and self.source.works_ahead and not last:
            self._states_before_ahead = deepcopy(self._states())
            if not isinstance(self.source, SamplingAhead):  # which waits by itself
                await self._published()
            self.source.start_ahead()
        parts = await self._run(mini_batches, batch, self.cfg, step=self.step)
        several, watched = len(parts) > 1, self.algo.watches_drift
        self._moved = False
        before = await self._fit(self.passes.score, batch) if several or watched else None
        stats, work = StatBuffer(), Workload()
        lines, skipped = list[Metrics](), list[Metrics]()
        rate = learning_rate(self.cfg, self.step)
        self.optimizer.zero_grad()  # a step that raised may have left half of a gradient
        scores = ScoreRecord(batch) if await self._logging_tokens() else None
        for number, part in enumerate(parts):
            clock.lap("perf/other_s")
            accumulate = functools.partial(
                self.passes.accumulate,
                part.layout,
                self.optimizer,
                stats,
                version=self.version,
                proximal=[before[i] for i in part.members] if before and several else None,
                # Of the first epoch only: later ones repeat the same tokens.
                keep=(scores, part.members)
                if scores and number * self.cfg.epochs < len(parts)
                else None,
            )
            work += await self._fit(accumulate)
            norm = await self._run(self.optimizer.gradient_norm)
            line = await self._run(stats.reduce, self.world.group, norm)
            clock.lap("perf/forward_backward_s")
            if not all(map(math.isfinite, (line["train/loss"], line["train/grad_norm"]))):
                self._skip(batch, line)
                skipped.append(line)
                continue
            if line["train/loss"] and not self.optimizer.gradients():
                raise TrainingError(
                    f"the loss of {self.algo.name!r} is {line['train/loss']:.3g}, and no trained "
                    "parameter got a gradient of it: look for a `detach()` or `no_grad()` in the "
                    "loss, or an adapter that is turned off"
                )
            lines.append(line)
            if not self._moved and self.publisher and self.publisher.shares_weights:
                await self._settle()  # the next batch must be sampled under the present policy
            async with self.publisher.updating() if self.publisher else nullcontext():
                clip = clipped(line["train/grad_norm"], self.cfg.max_grad_norm)
                await self._fit(self.optimizer.step, rate, clip)
            self._moved = True
            clock.lap("perf/optimizer_s")
        if scores is not None:
            await self._run(scores.write, self.token_log, self.step + 1, self.world)
            clock.lap("perf/other_s")
        await self._settle()
        clock.lap("perf/wait_for_next_batch_s")
        metrics = over_steps(lines or skipped)
        if self._moved and watched and before is not None:
            # Not earlier: a batch sampled ahead belongs to the policy from before this update.
            after = await self._run(self.passes.score, batch)
            metrics["train/update_kl"] = mean_kl(before, after)
            self._observe_drift(metrics["train/update_kl"])
        self.step, self._taken = self.step + 1, self._taken + 1
        if self._moved:
            self.version += 1
            metrics |= await self._publish()
        clock.lap("perf/publish_s")
        metrics |= {
            "train/step": float(self.step),
            "train/version": float(self.version),
            "train/learning_rate": rate,
            "train/nonfinite_steps": float(self.nonfinite_steps),
            **batch_metrics(batch),
            **self.perf.metrics(batch, clock, work, passes=self.cfg.epochs),
            "perf/checkpoint_s": self._saving_s,
        }
        self.log.write(metrics, step=self.step)
        await self._evaluate()
        # Last of all: a run killed before this repeats the step and its log lines.
        self._saving_s = 0.0
        if self._checkpoints and self.step % self._checkpoints.cfg.every == 0:
            await self._save()
        for callback in self.callbacks:
            if inspect.iscoroutine(told := callback(self.step, metrics)):
                await told
        return metrics

    def _check_trained(self) -> None:
        """Refuses parameters that the optimizer, made with the trainer, does not know. All are
        looked at before the first step, and then those that were frozen: that takes microseconds,
        where going through a model with adapters takes 5 ms."""
        known = set(map(id, self.optimizer.parameters.values()))
        named = self._frozen if self._taken else self.model.named_parameters()
        new = [name for name, p in named if p.requires_grad and id(p) not in known]
        if new:
            raise ConfigError(
                f"{len(new)} parameters require a gradient that did not when the trainer was made, "
                f"so they would not be trained: {', '.join(new[:3])}. Add or unfreeze parameters "
                "first, then make the trainer"
            )

    async def _next_batch(self) -> SAWBatch:
        for _ in range(_MOST_LOSSES):
            try:
                return await self.intake.next_batch(self.source, self.version)
            except PolicyLostError as exc:
                if self.world.leads:
                    _log.warning("%s: version %d is published again", exc, self.version)
                await self._publish()
        raise TrainingError(f"no batch came: the samplers lost the policy {_MOST_LOSSES} times")

    async def _fit(self, work: Callable[..., T], *args: Any) -> T:
        """`_run` for what takes much memory. Where nothing helps, a checkpoint is written: of the
        steps so far, if this one has moved no weight, and without the batch that did not fit."""
        try:
            return await self._run(work, *args)
        except OutOfMemoryError as exc:
            alone = self.world.size == 1
            if self._checkpoints and (alone or exc.on_all_ranks) and not self._moved:
                self.optimizer.zero_grad()
                if self._checkpoints.last_step != self.step:
                    await self._save()
                exc.add_note(f"The checkpoint of step {self.step} is in {self._checkpoints.folder}")
            raise

    async def _logging_tokens(self) -> bool:
        """Whether rank 0 has a token log: all ranks take part in filling it."""
        if self._logs_tokens is None:
            told = await self._run(self.world.share, {"logs": self.token_log is not None})
            self._logs_tokens = bool(told["logs"])
        return self._logs_tokens

    def _observe_drift(self, kl: float) -> None:
        """Tells the algorithm, and the state of it that a checkpoint of this step would have."""
        if (before := self._states_before_ahead) is not None:
            before["algorithm"] = dict(self.algo.drifted(before["algorithm"], kl))
        self.algo.observe_drift(kl)

    def _skip(self, batch: SAWBatch, metrics: Metrics) -> None:
        """Discards the gradient; past the limit, raises."""
        self.optimizer.zero_grad()
        self.nonfinite_steps += 1
        where = self.log.write_samples(f"nonfinite-step-{self.step}", batch)
        if self.nonfinite_steps > self.cfg.max_nonfinite_steps:
            raise NonFiniteError(
                f"loss {metrics['train/loss']} and gradient norm {metrics['train/grad_norm']} at "
                f"step {self.step}; {self.nonfinite_steps} steps were not finite, over "
                f"max_nonfinite_steps={self.cfg.max_nonfinite_steps}. The samples are in {where}"
            )

    async def _settle(self) -> None:
        """Waits until no batch is being made, on every rank."""
        if self.source is not None:
            what, limit = "the batch that is made ahead", self.cfg.batch_timeout_s
            await bounded(self.source.settle(), what, self._source_name, limit)
        if self.cfg.overlap:
            await self._run(self.world.barrier)

    async def _publish(self) -> Metrics:
        if self.publisher is None:
            return {}
        what, whom = f"the publish of version {self.version}", type(self.publisher).__name__
        limit = limit_of(self.publisher, self.cfg.publish_timeout_s)
        publish = self.publisher.publish(ModelWeights(self.model), self.version)
        return self._publish_log.take(await bounded(publish, what, whom, limit))

    async def _published(self) -> None:
        """Returns when the samplers have the newest version, or says why they have not."""
        if self.publisher is not None:
            await self.publisher.settle()

    async def _for_all(self, work: Awaitable[None]) -> None:
        """Awaits rank 0's work at a point that all ranks reach: if it fails there, all raise."""
        error: Exception | None = None
        try:
            await work
        except Exception as exc:  # the other ranks wait to be told
            error = exc
        await self._run(self.world.agree, error)

    async def _evaluate(self) -> None:
        if self.evaluate and self.cfg.eval_every and self.step % self.cfg.eval_every == 0:
            await self._for_all(self._published())
            results: Mapping[str, float] = {}
            if self.world.leads:
                by = self.evaluate
                results = await by(self.step) if callable(by) else (await by.evaluate()).metrics()
            self.log.write({"eval/step": float(self.step), **results}, step=self.step)
            await self._run(self.world.barrier)

    def _states(self) -> dict[str, Any]:
        return {name: dict(part.state_dict()) for name, part in self._stateful.items()}

    async def _save(self) -> None:
        assert self._checkpoints is not None
        clock = self.perf.clock()
        await self._for_all(self._flush_record())
        parts = self._states_before_ahead or self._states()
        state = TrainerState(self.step, self.version, self.nonfinite_steps, curve(self.cfg), parts)
        then: Callable[[], object] = bool
        if self.source is not None:
            then = functools.partial(self.source.committed, parts["batch_source"])
        await self._run(self._checkpoints.save, self.model, self.optimizer, state, then)
        clock.lap("save")
        self._saving_s = clock.elapsed

    async def _flush_record(self) -> None:
        if self.source is not None:
            await self.source.flush_record()
        if self.token_log is not None:
            await self.token_log.flush_async()

    def _resume(self) -> None:
        assert self._checkpoints is not None
        state = self._checkpoints.resume(self.model, self.optimizer)
        if state is None:
            if self._checkpoints.cfg.resume:  # killed before its first checkpoint, perhaps
                self.log.begin()
            return
        self.step, self.version = state.step, state.version
        self.nonfinite_steps = state.nonfinite_steps
        self.log.rewind(state.step)
        change = describe_change(self.cfg, state.curve, state.step)
        if change and self.world.leads:
            _log.warning("%s", change)
        for name, part in self._stateful.items():
            if name in state.parts:
                part.load_state_dict(state.parts[name])

    def close(self) -> None:
        """Closes the loggers and the compute thread. A closed trainer cannot train any more."""
        self.log.close()
        self._compute.shutdown(wait=True)
        self.optimizer.close()

    async def _run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs `work` in the trainer's own thread, so that the event loop can keep sampling."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compute, functools.partial(work, *args, **kwargs))
