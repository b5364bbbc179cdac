"""Synchronous online RL: every batch is sampled from the current policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ludic.errors import CheckpointError, ConfigError, RolloutError
from ludic.rollouts.curricula import Curriculum
from ludic.rollouts.engine import RolloutEngine
from ludic.rollouts.progress import Budget, ProgressCallback
from ludic.rollouts.requests import RolloutRequest
from ludic.rollouts.storage import BufferedWriter, RolloutWriterLike
from ludic.rollouts.strategies import RequestStrategy
from ludic.saw.assembly import batch_from_rollouts
from ludic.saw.filters import SampleFilter
from ludic.saw.grouping import settle_groups
from ludic.saw.items import SAWBatch
from ludic.saw.overlong import LOST_MEMBER
from ludic.seeding import derive_seed
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.requests import RequestFeed, RequestFn
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """DAPO's dynamic sampling: groups whose rewards are all equal, which teach nothing, are dropped
    ("no_variance") and others sampled in their place, for at most `max_rounds` rounds."""

    max_rounds: int = 4

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ConfigError(f"DynamicSampling.max_rounds={self.max_rounds}: must be >= 1")


class RolloutBatchSource:
    """Rolls out requests and makes one batch per call of `next_batch`.

    `request_fn` is a function of the step or without arguments, or a `Curriculum`. Where dynamic
    sampling asks a function again, that counts as a step: it is given a number that it was not
    given before, so that the prompts are new. Without a
    `request_strategy`, requests become groups of the algorithm's group size; requests that already
    have a `group_id` stay as they are. `rollouts_per_update` is the number of episodes per batch
    (each gives one rollout per agent). The `budget` is for the whole run: when it is spent,
    `next_batch` raises `StopAsyncIteration`. Seeds are derived from the engine's seed and the step.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        request_fn: RequestFn | Curriculum,
        algorithm: RLAlgorithm,
        max_steps: int = 100,
        concurrency: int = 8,
        request_strategy: RequestStrategy | None = None,
        sample_filter: SampleFilter | None = None,
        merge: bool = True,
        writer: RolloutWriterLike | None = None,
        rollouts_per_update: int | None = None,
        resample: DynamicSampling | None = None,
        budget: Budget | None = None,
        max_empty_batches: int = 8,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self.engine = engine
        self.algorithm = algorithm
        self.max_steps = max_steps
        self.concurrency = concurrency
        self.sample_filter = sample_filter
        self.merge = merge
        self.writer = writer
        self.rollouts_per_update = rollouts_per_update
        self.resample = resample
        self.budget = budget or Budget()
        self.max_empty_batches = max_empty_batches
        self.on_progress = on_progress
        self.step = 0
        self._draws = 0
        """How often requests were asked for: once for each round of each step."""
        self._episodes = 0
        self._tokens = 0
        self._feed = RequestFeed(request_fn, algorithm, request_strategy, rollouts_per_update)
        if resample is not None and (algorithm.group_size or self._feed.strategy.group_size) == 1:
            raise ConfigError("DynamicSampling needs groups: give a GRPORequestStrategy")

    async def next_batch(self) -> SAWBatch:
        """The next batch. If one turns out empty, the next is tried, up to `max_empty_batches` in
        all."""
        return await first_filled(self._sample, self.max_empty_batches)

    async def _sample(self, drops: Counter[str]) -> SAWBatch:
        if self._spent():
            raise StopAsyncIteration(f"the budget is spent: {self.budget}")
        kept, sampled, rounds = await self._rollouts(drops)
        batch = batch_from_rollouts(
            kept,
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
        wanted = len(_groups(sampled))
        kept = self._with_variance(sampled, drops)
        rounds = 1
        while len(_groups(kept)) < wanted and rounds < self.resample.max_rounds:
            if self._spent():
                break
            draw = self._draws + rounds
            requests = await self._feed.next(draw, wanted - len(_groups(kept)))
            found = await self._round(requests, rounds)
            kept += self._with_variance(found, drops)
            sampled += found
            rounds += 1
        return kept, sampled, rounds

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
                r
                if r.sampling_seed is None
                else replace(r, sampling_seed=derive_seed(r.sampling_seed, "round", number))
                for r in requests
            ]
        expanded = self._feed.expand(requests, f"{prefix}/")
        if number == 0:
            self._check_count(expanded)
        left = self.budget.max_episodes
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
            raise StopAsyncIteration(f"the budget has no room for another group: {self.budget}")
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
        tokens, episodes = self.budget.max_tokens, self.budget.max_episodes
        return (tokens is not None and self._tokens >= tokens) or (
            episodes is not None and self._episodes >= episodes
        )

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


def _groups(rollouts: Sequence[Rollout]) -> set[str | None]:
    return {r.group_id for r in rollouts}
