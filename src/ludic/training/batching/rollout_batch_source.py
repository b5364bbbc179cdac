"""Synchronous online RL: every batch is sampled from the current policy."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace

from ludic.errors import CheckpointError, ConfigError, RolloutError
from ludic.rollouts.engine import Budget, ProgressCallback, RolloutEngine
from ludic.rollouts.requests import (
    Curriculum,
    GRPORequestStrategy,
    IdentityStrategy,
    RequestStrategy,
    RolloutRequest,
)
from ludic.rollouts.storage import BufferedWriter, RolloutWriterLike
from ludic.saw.batch import LOST_MEMBER
from ludic.saw.building import batch_from_rollouts, settle_groups
from ludic.saw.filters import SampleFilter
from ludic.saw.items import SAWBatch
from ludic.seeding import derived
from ludic.training.algorithm import RLAlgorithm, Stateful
from ludic.training.batching.source import BatchSource
from ludic.types import Rollout

Requests: TypeAlias = Sequence[RolloutRequest]
RequestFn: TypeAlias = Callable[..., Requests | Awaitable[Requests]]
"""`fn(step)` or `fn()`. One that remembers what it returned is also `Stateful`."""


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """DAPO's dynamic sampling: groups whose rewards are all equal, which teach nothing, are dropped
    ("no_variance") and others sampled in their place, for at most `max_rounds` rounds."""

    max_rounds: int = 4

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ConfigError(f"DynamicSampling.max_rounds={self.max_rounds}: must be >= 1")


@dataclass(eq=False, repr=False, kw_only=True)
class RolloutBatchSource(BatchSource):
    """Rolls out requests and makes one batch per call of `next_batch`.

    `request_fn` is a function of the step or without arguments, or a `Curriculum`. Where dynamic
    sampling asks a function again, that counts as a step: it is given a number that it was not
    given before, so that the prompts are new. Without a `request_strategy`, requests become groups
    of the algorithm's group size; requests that already have a `group_id` stay as they are.
    `rollouts_per_update` is the number of episodes per batch (each gives one rollout per agent).
    The `budget` is for the whole run: when it is spent, `next_batch` raises `StopAsyncIteration`.
    Seeds are derived from the engine's seed and the step.
    """

    engine: RolloutEngine
    request_fn: RequestFn | Curriculum
    algorithm: RLAlgorithm
    max_steps: int = 100
    concurrency: int = 8
    request_strategy: RequestStrategy | None = None
    sample_filter: SampleFilter | None = None
    merge: bool = True
    writer: RolloutWriterLike | None = None
    rollouts_per_update: int | None = None
    resample: DynamicSampling | None = None
    budget: Budget | None = None
    max_empty_batches: int = 8
    on_progress: ProgressCallback | None = None
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._limits = self.budget or Budget()
        self._draws = self._episodes = self._tokens = 0  # a draw is a round of a step
        self._feed = RequestFeed(
            self.request_fn, self.algorithm, self.request_strategy, self.rollouts_per_update
        )
        group_size = self.algorithm.group_size or self._feed.strategy.group_size
        if self.resample is not None and group_size == 1:
            raise ConfigError("DynamicSampling needs groups: give a GRPORequestStrategy")

    async def next_batch(self) -> SAWBatch:
        """The next batch. If one turns out empty, the next is tried, up to `max_empty_batches` in
        all."""
        return await first_filled(self._sample, self.max_empty_batches)

    async def _sample(self, drops: Counter[str]) -> SAWBatch:
        if self._spent():
            raise StopAsyncIteration(f"the budget is spent: {self._limits}")
        rollouts, sampled, rounds = await self._rollouts(drops)
        batch = batch_from_rollouts(
            rollouts,
            self.algorithm.credit_assigner,
            sample_filter=self.sample_filter,
            merge=self.merge,
            lost_member=self.engine.group_policy,
            drops=drops,
            meta={
                "source_step": self.step,
                "sampling_rounds": rounds,
                LOST_MEMBER: self.engine.group_policy,
            },
            # The log shows how well the policy does, so it counts dropped rollouts too.
            sampled=sampled,
        )
        self.step += 1
        self._draws += rounds
        return batch

    async def _rollouts(self, drops: Counter[str]) -> tuple[list[Rollout], list[Rollout], int]:
        """The batch's rollouts, all rollouts that were sampled for it, and the number of rounds."""
        sampled = await self._round(await self._feed.next(self._draws), 0)
        if self.resample is None:
            return sampled, sampled, 1
        wanted = len({r.group_id for r in sampled})
        varied = self._with_variance(sampled, drops)
        rounds = 1
        while rounds < self.resample.max_rounds and not self._spent():
            missing = wanted - len({r.group_id for r in varied})
            if missing <= 0:
                break
            requests = await self._feed.next(self._draws + rounds, missing)
            fresh = await self._round(requests, rounds)
            varied += self._with_variance(fresh, drops)
            sampled += fresh
            rounds += 1
        return varied, sampled, rounds

    def _with_variance(self, rollouts: Sequence[Rollout], drops: Counter[str]) -> list[Rollout]:
        """The rollouts of complete groups in which some role's rewards differ; the others are
        counted as dropped."""
        whole = settle_groups(rollouts, self.engine.group_policy, drops)
        rewards: dict[tuple[str | None, str], set[float]] = {}
        for r in whole:
            rewards.setdefault((r.group_id, r.agent_id), set()).add(r.total_reward)
        varied = {group for (group, _), values in rewards.items() if len(values) > 1}
        for r in whole:
            if r.group_id not in varied:
                drops["no_variance"] += len({step.turn_index for step in r.agent_steps})
        return [r for r in whole if r.group_id in varied]

    async def _round(self, requests: Sequence[RolloutRequest], number: int) -> list[Rollout]:
        prefix = f"step-{self.step}" + (f"-round-{number}" if number else "")
        if number:
            # The same request may come again; its sampling must differ.
            requests = [
                replace(r, sampling_seed=derived(r.sampling_seed, "round", number))
                for r in requests
            ]
        expanded = self._feed.expand(requests, f"{prefix}/")
        if number == 0:
            self._check_count(expanded)
        left = self._limits.max_episodes
        rollouts = await self.engine.generate_rollouts(
            expanded,
            self.max_steps,
            self.concurrency,
            prefix=prefix,
            budget=None if left is None else Budget(max_episodes=left - self._episodes),
            on_progress=self.on_progress,
            writer=self.writer,
        )
        if not rollouts:
            raise StopAsyncIteration(f"the budget has no room for another group: {self._limits}")
        self._episodes += len({r.episode_id for r in rollouts})
        self._tokens += sum(r.num_tokens for r in rollouts)
        self._feed.report(rollouts)
        return rollouts

    def _check_count(self, requests: Sequence[RolloutRequest]) -> None:
        episodes = sum(r.num_episodes for r in requests)
        if self.rollouts_per_update not in (None, episodes):
            raise ConfigError(
                f"request_fn and the strategy make {episodes} episodes for step {self.step}, and "
                f"rollouts_per_update={self.rollouts_per_update}: make them agree"
            )

    def _spent(self) -> bool:
        return not self._limits.has_room(self._tokens, self._episodes + 1)

    async def flush_record(self) -> None:
        """Returns when the rollouts so far are on disk, if they are written there."""
        writer = self.engine.writer if self.writer is None else self.writer
        if isinstance(writer, BufferedWriter):
            await writer.flush_async()

    def state_dict(self) -> Mapping[str, Any]:
        """Everything that determines what comes next: the step, what was spent, and the
        curriculum's state, if it has one. The trainer saves the algorithm's state."""
        return {
            "step": self.step,
            "draws": self._draws,
            "episodes": self._episodes,
            "tokens": self._tokens,
            "requests": self._feed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken."""
        try:
            step, episodes, tokens = (int(state[k]) for k in ("step", "episodes", "tokens"))
            draws = int(state.get("draws", step))  # older checkpoints have none
            requests = state["requests"]
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(f"not the state of a RolloutBatchSource: {exc!r}") from exc
        self._feed.load_state_dict(requests)
        self.step, self._draws, self._episodes, self._tokens = step, draws, episodes, tokens


async def first_filled(
    sample: Callable[[Counter[str]], Awaitable[SAWBatch]], attempts: int
) -> SAWBatch:
    """The first batch that has anything to train on, of at most `attempts`. `sample` makes one, and
    counts on from what those before it dropped."""
    drops: Counter[str] = Counter()
    for _ in range(attempts):
        batch = await sample(drops)
        if batch.items:
            return batch
        drops = Counter(batch.meta["dropped"])
    raise RolloutError(
        f"{attempts} batches in a row had nothing to train on; dropped, in turns: {dict(drops)}. "
        "Loosen the filters, or look at why rewards do not vary"
    )


class RequestFeed:
    """Requests from a function or a curriculum, through one interface, and their groups.

    A curriculum is asked for the number needed and told the outcomes. A function that takes an
    argument is given the step; any other is called without one. Without a `strategy`, requests
    become groups of the algorithm's size, and those that have a `group_id` stay as they are.
    """

    def __init__(
        self,
        source: RequestFn | Curriculum,
        algorithm: RLAlgorithm,
        strategy: RequestStrategy | None,
        rollouts_per_update: int | None,
    ) -> None:
        self.source = source
        self.strategy = choose_strategy(strategy, algorithm)
        self._keeps_groups = strategy is None
        count, size = rollouts_per_update, self.strategy.group_size
        if count is not None:
            algorithm.check_rollouts_per_update(count)
            if count % size:
                raise ConfigError(
                    f"rollouts_per_update={count} is not a multiple of the request strategy's "
                    f"group_size={size}: a batch holds whole groups"
                )
            count //= size
        self.count = count
        if not isinstance(source, Curriculum):
            if not callable(source):
                raise ConfigError(f"request_fn={source!r} is neither a function nor a Curriculum")
            self._takes_step = _takes_argument(source)
        elif count is None:
            raise ConfigError(
                "a curriculum needs to know how many requests to make: set rollouts_per_update"
            )

    async def next(self, step: int, count: int | None = None) -> list[RolloutRequest]:
        """The requests of `step`; at most `count` of them, if given."""
        if isinstance(self.source, Curriculum):
            wanted = self.count if count is None else count
            assert wanted is not None
            return list(self.source.next_requests(wanted))
        given = self.source(step) if self._takes_step else self.source()
        requests = list(await given if inspect.isawaitable(given) else given)
        if not requests:
            raise ConfigError(f"request_fn gave no requests for step {step}")
        return requests if count is None else requests[:count]

    def expand(self, requests: Requests, prefix: str) -> list[RolloutRequest]:
        """The requests of whole groups; the groups' names begin with `prefix`."""
        strategy = self.strategy
        if self._keeps_groups and all(r.group_id is not None for r in requests):
            strategy = IdentityStrategy()
        return strategy.expand(requests, prefix=prefix)

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """Tells the curriculum how it went."""
        if isinstance(self.source, Curriculum):
            self.source.report(rollouts)

    def state_dict(self) -> Mapping[str, Any] | None:
        return dict(self.source.state_dict()) if isinstance(self.source, Stateful) else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if isinstance(self.source, Stateful) == (state is None):
            raise CheckpointError(
                "the checkpoint and this run's request_fn do not match: one of them has a state "
                "and the other has none; resume with the request_fn that the run began with"
            )
        if isinstance(self.source, Stateful) and state is not None:
            self.source.load_state_dict(state)


def choose_strategy(strategy: RequestStrategy | None, algorithm: RLAlgorithm) -> RequestStrategy:
    """The given strategy, checked against the algorithm's group size; without one, the strategy
    that the algorithm needs."""
    size = algorithm.group_size
    if strategy is None:
        return IdentityStrategy() if size is None else GRPORequestStrategy(size)
    if size is not None and strategy.group_size not in (1, size):
        raise ConfigError(
            f"the request strategy makes groups of {strategy.group_size}, and the algorithm "
            f"compares groups of {size}: give both the same group_size"
        )
    return strategy


def _takes_argument(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return any(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)
