"""The rollout engine: requests in, rollouts or batches out, within a budget and
a rate of failures."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias, TypedDict, TypeVar, Unpack

from msgspec.structs import replace

from ludic.errors import ConfigError, RolloutError
from ludic.interaction.base import Runtime
from ludic.plumbing.text import TRACEBACK
from ludic.rollouts.episode_runner import EnvFactory, EpisodeRunner, ProtocolFactory
from ludic.rollouts.processes.pool import WorkerPool
from ludic.rollouts.requests import PlannedEpisode, RolloutRequest, place_in_plan, plan_episodes
from ludic.rollouts.storage import RolloutWriter, RolloutWriterLike, write_rollouts
from ludic.saw.building import Algorithm, LostMember, batch_from_rollouts
from ludic.saw.filters import SampleFilter
from ludic.saw.items import SAWBatch
from ludic.types import Rollout
from ludic.workers.threads import contained

Job = TypeVar("Job")
Result = TypeVar("Result")

_STOP_S = 30.0
"""How long cancelled jobs may take to clean up before they are left behind."""

LostMemberPolicy: TypeAlias = Literal["drop_group", "keep_partial", "retry"]
"""What happens when an episode of a group fails. "drop_group": none of the group is trained on.
"keep_partial": those that are left are. "retry": the episode is run again with new sampling noise,
up to `max_retries` times, and after that the group is dropped."""


class CallOptions(TypedDict, total=False):
    """What every call of the engine takes besides what is to be played. `prefix` begins every id
    and takes part in the seeds that requests leave open; by default it counts the calls. A `writer`
    takes the place of the engine's. With `judged=False` the caller judges how many failed."""

    prefix: str | None
    budget: Budget | None
    on_progress: ProgressCallback | None
    writer: RolloutWriterLike | None
    judged: bool


class RolloutEngine:
    """Runs episodes concurrently and isolates their failures.

    Registries map names to factories; None stands for the global registry. A failed episode
    comes back as a rollout with `error` set, and when more than `max_failure_rate` of the last
    episodes failed, the call ends with a `RolloutError` that lists the causes. `writer` is given
    every rollout as it finishes. `seed` is the root of seeds that requests leave open. With
    `workers`, episodes are played in their processes; the rollouts are the same. Environments of
    the kinds in `isolated` run in processes of their own, which can be killed when they hang.
    """

    def __init__(
        self,
        env_registry: Mapping[str, EnvFactory] | None = None,
        protocol_registry: Mapping[str, ProtocolFactory] | None = None,
        *,
        runtime: Runtime | None = None,
        seed: int = 0,
        step_timeout_s: float | None = 60.0,
        episode_timeout_s: float | None = 600.0,
        max_failure_rate: float = 0.5,
        lost_member: LostMemberPolicy = "drop_group",
        max_retries: int = 2,
        writer: RolloutWriterLike | None = None,
        workers: WorkerPool | None = None,
        isolated: Iterable[str] = (),
    ) -> None:
        if lost_member not in ("drop_group", "keep_partial", "retry"):
            raise ConfigError(
                f"lost_member={lost_member!r}: must be 'drop_group', 'keep_partial' or 'retry'"
            )
        self.runtime = runtime
        self.seed = seed
        self.lost_member = lost_member
        self.max_retries = max_retries if lost_member == "retry" else 0
        self.writer, self.workers = writer, workers
        self._runner = EpisodeRunner(
            env_registry,
            protocol_registry,
            runtime,
            step_timeout_s,
            episode_timeout_s,
            frozenset(isolated),
        )
        self._monitor = FailureMonitor(max_failure_rate)
        self._calls = 0

    @property
    def group_policy(self) -> LostMember:
        """What is done with a group that has still lost a member after any retries."""
        return "keep_partial" if self.lost_member == "keep_partial" else "drop_group"

    async def generate_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int = 100,
        concurrency: int = 8,
        **options: Unpack[CallOptions],
    ) -> list[Rollout]:
        """All rollouts, failed ones included, by request, then episode, then agent. The order does
        not depend on which episode finished first."""
        stream = self.stream_rollouts(requests, max_steps, concurrency, **options)
        async with aclosing(stream):
            rollouts = [rollout async for rollout in stream]
        return sorted(rollouts, key=place_in_plan)

    async def stream_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int = 100,
        concurrency: int = 8,
        *,
        prefix: str | None = None,
        budget: Budget | None = None,
        on_progress: ProgressCallback | None = None,
        writer: RolloutWriterLike | None = None,
        judged: bool = True,
    ) -> AsyncGenerator[Rollout, None]:
        """The same rollouts one by one, as their episodes finish; those of one episode stay
        together. A consumer that falls behind slows the episodes down; one that stops early
        closes the stream (`contextlib.aclosing`), which cancels what is running."""
        for name, value in (("max_steps", max_steps), ("concurrency", concurrency)):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if prefix is None:
            prefix = f"call-{self._calls}"
            self._calls += 1
        writer = self.writer if writer is None else writer
        play = self._runner.afresh().run
        if self.workers is not None:
            encode = isinstance(writer, RolloutWriter)
            play = partial(self.workers.play, self._runner, encode=encode)
        plan = plan_episodes(requests, seed=self.seed, prefix=prefix)
        gate = BudgetGate(budget, plan)
        failed: Counter[str] = Counter()
        finished = 0

        async def run(episode: PlannedEpisode) -> list[Rollout]:
            earlier: list[str] = []
            while True:
                rollouts = await play(episode, max_steps)
                cause = self._noted(rollouts, failed, judged)
                if cause is None or episode.group_id is None or episode.attempt >= self.max_retries:
                    break
                earlier.append(cause)
                episode = episode.retried()
            if earlier:
                rollouts = [
                    replace(r, meta={**r.meta, "earlier_errors": earlier}) for r in rollouts
                ]
            gate.tokens += sum(rollout.num_tokens for rollout in rollouts)
            if writer is not None:
                await write_rollouts(writer, rollouts)
            return rollouts

        def report() -> None:
            if on_progress is not None:
                skipped = len(plan) - gate.admitted if gate.closed else 0
                on_progress(Progress(len(plan), finished, gate.tokens, skipped, dict(failed)))

        report()
        results = run_bounded(filter(gate.admits, plan), run, min(concurrency, max(len(plan), 1)))
        async with aclosing(results):
            async for rollouts in results:
                finished += 1
                report()
                for rollout in rollouts:
                    yield rollout

    async def generate_batch(
        self,
        requests: Sequence[RolloutRequest],
        algorithm: Algorithm,
        sample_filter: SampleFilter | None = None,
        *,
        max_steps: int = 100,
        concurrency: int = 8,
        merge: bool = True,
        **options: Unpack[CallOptions],
    ) -> SAWBatch:
        """Rollouts with credit, filtered and merged; `meta` has the statistics, and the drops by
        reason. A batch may turn out empty. The trainer applies the algorithm's preprocess."""
        return batch_from_rollouts(
            await self.generate_rollouts(requests, max_steps, concurrency, **options),
            algorithm.credit_assigner,
            sample_filter=sample_filter,
            merge=merge,
            lost_member=self.group_policy,
        )

    def _noted(self, rollouts: Sequence[Rollout], failed: Counter[str], judged: bool) -> str | None:
        """Why an attempt failed, or None; counts it either way."""
        cause = trace = None
        for rollout in rollouts:
            if rollout.error is not None:
                cause, trace = cause or rollout.error, trace or rollout.meta.get(TRACEBACK)
        if cause is not None:
            failed[cause] += 1
        if judged:
            self._monitor.record(cause, trace)
        return cause


async def run_bounded(
    jobs: Iterable[Job], run: Callable[[Job], Awaitable[Result]], concurrency: int
) -> AsyncGenerator[Result, None]:
    """Runs `run(job)` for every job, at most `concurrency` at a time, and yields each result as it
    comes. Jobs are drawn one by one, when there is room for them.

    The first exception ends everything: what is running is cancelled, and it is raised. The same
    happens without an exception when the generator is closed. A slow consumer holds jobs back.
    """
    pending = iter(jobs)
    done: deque[tuple[Result] | Exception] = deque()
    news, room = asyncio.Event(), asyncio.Event()
    working = concurrency

    async def work() -> None:
        nonlocal working
        try:
            for job in pending:
                # An error that ends only this worker would lose its jobs without a word.
                with contained(RolloutError, "a job"):
                    done.append((await run(job),))
                news.set()
                while len(done) >= concurrency:
                    room.clear()
                    await room.wait()
        except Exception as exc:
            done.append(exc)
        finally:
            working -= 1
            news.set()

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        while working or done:
            if not done:
                news.clear()
                await news.wait()
                continue
            result = done.popleft()
            if len(done) < concurrency:
                room.set()
            if isinstance(result, Exception):
                raise result
            yield result[0]
    finally:
        if still := [worker for worker in workers if not worker.done()]:
            for worker in still:
                worker.cancel()
            await asyncio.wait(still, timeout=_STOP_S)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a call of the engine stands, in episodes. `failed` counts failed attempts by cause,
    retried ones included; `not_started` those that the budget left no room for."""

    total: int
    finished: int = 0
    tokens: int = 0
    not_started: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)


ProgressCallback: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that may be spent. An episode or group that has begun is finished; when the next
    would have no room left, neither it nor any after it is started. `max_tokens` counts sampled
    tokens of finished episodes, so those in flight at that moment come on top."""

    max_tokens: int | None = None
    max_episodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_episodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Budget.{name}={value}: must be at least 1, or None")

    def has_room(self, tokens: int, episodes: int) -> bool:
        """Whether another may begin, after so many tokens, if that makes so many episodes."""
        return (self.max_tokens is None or tokens < self.max_tokens) and (
            self.max_episodes is None or episodes <= self.max_episodes
        )


class BudgetGate:
    """Decides, episode by episode in the order of the plan, whether it may begin."""

    def __init__(self, budget: Budget | None, episodes: Iterable[PlannedEpisode]) -> None:
        self._budget = budget or Budget()
        self._group_sizes = Counter(e.group_id for e in episodes if e.group_id is not None)
        self._begun: set[str | None] = set()
        self._reserved = 0
        self.closed = False
        self.admitted = 0
        self.tokens = 0

    def admits(self, episode: PlannedEpisode) -> bool:
        """Whether `episode` may begin; admitting the first of a group admits the whole group."""
        group = episode.group_id
        if group is None or group not in self._begun:
            size = 1 if group is None else self._group_sizes[group]
            if self.closed or not self._budget.has_room(self.tokens, self._reserved + size):
                self.closed = True
                return False
            self._reserved += size
            self._begun.add(group)
        self.admitted += 1
        return True


MOST_TRACEBACKS = 32


class FailureMonitor:
    """Raises when too many of the last episodes failed.

    The rate is over the last `window` attempts; until there are `MIN_ATTEMPTS`, it is taken as
    if there were that many, so that one failure in a small batch does not end a run.
    """

    MIN_ATTEMPTS = 8

    def __init__(self, max_rate: float, window: int = 256) -> None:
        if not 0 <= max_rate <= 1:
            raise ConfigError(f"max_failure_rate={max_rate}: must be between 0 and 1")
        self.max_rate = max_rate
        self._causes: deque[str | None] = deque(maxlen=window)
        self._tracebacks: dict[str, str] = {}

    def record(self, cause: str | None, trace: str | None = None) -> None:
        """Notes one attempt, by the cause of its failure or None. The error has the traceback of
        the most frequent cause that came with one lately as a note, which Python prints with it."""
        self._causes.append(cause)
        if cause is None:
            return
        if trace is not None and cause not in self._tracebacks:
            if len(self._tracebacks) == MOST_TRACEBACKS:
                del self._tracebacks[next(iter(self._tracebacks))]
            self._tracebacks[cause] = trace
        failures = Counter(c for c in self._causes if c is not None)
        attempts = max(len(self._causes), self.MIN_ATTEMPTS)
        if failures.total() > self.max_rate * attempts:
            shown = "\n".join(f"  {n} x {c}" for c, n in failures.most_common(5))
            error = RolloutError(
                f"{failures.total()} of the last {len(self._causes)} episodes failed, over "
                f"max_failure_rate={self.max_rate}:\n{shown}"
            )
            kept = self._tracebacks
            if note := next((kept[c] for c, _ in failures.most_common() if c in kept), None):
                error.add_note(note)
            raise error
