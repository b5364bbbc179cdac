"""Batches from actors: asks for units, reads finished groups, and says what was trained on."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from ludic.errors import CheckpointError, DeadlineError, PipelineError, RolloutError
from ludic.pipeline import reading
from ludic.pipeline.lease import TrainerLease
from ludic.pipeline.ledger import Bounds, Ledger, UnitFeed
from ludic.pipeline.messages import Group, Unit, unit_message
from ludic.pipeline.store import LostRunError, entries, flat
from ludic.rollouts.requests import Curriculum
from ludic.rollouts.storage import BufferedWriter, RolloutWriterLike, write_rollouts
from ludic.saw.batch import LOST_MEMBER
from ludic.saw.building import LostMember, batch_from_rollouts
from ludic.saw.filters import SampleFilter
from ludic.saw.items import SAWBatch
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.rollout_batch_source import RequestFn, first_filled
from ludic.training.batching.source import BatchSource, batch_of_any_age

_log = logging.getLogger("ludic.pipeline")

_POLL_S = (0.01, 0.2)
_SLOWER = 1.05  # no pause is longer than a twentieth of the wait so far
_READ = 64
_ASK_AGAIN_S = 10.0
_MAX_EMPTY = 8


class PipelineBatchSource(BatchSource):
    """Batches of `rollouts_per_update` episodes, sampled by actors on any number of machines.

    Each unit is trained on once, or dropped with a reason that is counted. What a batch consumed
    is part of `state_dict`, and is acknowledged when `committed` is called with that state; after
    a resume, everything that was not is read again. With `in_order` batches have units in the order
    in which they were asked for, else in which they arrive. `checkpoint_every` is the trainer's,
    in updates: a bound below one interval's groups is refused. `wait_s` bounds the wait for a
    batch. The run ends where more than `max_failure_rate` of the last episodes failed. Use it in
    `async with`, or call `close`.

    A publish may be on its way: ages are counted from the trainer's own version, and with
    `stale="wait"` units say which version they need, so that the actors wait for it and the trainer
    does not.
    """

    waits_for_publish = False

    def __init__(
        self,
        *,
        lease: TrainerLease,
        request_fn: RequestFn | Curriculum,
        algorithm: RLAlgorithm,
        rollouts_per_update: int,
        checkpoint_every: int | None = None,
        max_steps: int = 100,
        sample_filter: SampleFilter | None = None,
        lost_member: LostMember = "drop_group",
        max_failure_rate: float = 0.5,
        max_lag: int = 1,
        stale: reading.StalePolicy = "wait",
        in_order: bool = True,
        bounds: Bounds | None = None,
        writer: RolloutWriterLike | None = None,
        wait_s: float = 3600.0,
    ) -> None:
        self.lease, self.writer = lease, writer
        self.algorithm: RLAlgorithm = algorithm
        self.sample_filter, self.lost_member = sample_filter, lost_member
        self.max_steps, self.max_lag, self.stale = max_steps, max_lag, stale
        self.in_order, self.wait_s = in_order, wait_s
        self._feed = UnitFeed(request_fn, algorithm, rollouts_per_update)
        self.groups_per_update = self._feed.groups_per_update
        reading.check_staleness(max_lag, stale)
        self.bounds = (bounds or Bounds()).checked(
            self.groups_per_update, checkpoint_every or 1, max_lag
        )
        self.step = 0
        self.ledger = Ledger()
        self._resumed = self._is_open = self._cut_short = False
        self._committed_units = self._emptied = 0
        self._failures = reading.FailureMonitor(max_failure_rate)
        self._bad = reading.BadGroups(max(64, 4 * self.groups_per_update))
        self._uncommitted: Mapping[str, Any] | None = None
        self._groups: dict[int, Group | reading.BadGroup] = {}
        self._lag = 0
        self._waited_s = 0.0
        self.alarm: Callable[[], object] = bool  # raises where no actor can come any more
        lease.facts.append(self._facts)

    # Opening and closing

    async def open(self) -> None:
        """Takes the run, and brings the streams in line with the state that was loaded."""
        if self._is_open:
            return
        opened = await self.lease.acquire_async()
        books = self.ledger
        done = {n for n, note in opened.units.items() if note == "c"}
        ahead = opened.low > books.low or any(not books.is_settled(n) for n in done)
        if ahead and not self._resumed:
            raise PipelineError(
                f"{self.lease.config.shown} has {opened.low} committed units of the run "
                f"{self.lease.config.run!r}, and there is no checkpoint here that they are in: "
                "resume that run, or choose another name (pipeline.name)"
            )
        # Units beyond the books are entered by the server's notes, which then must be whole.
        ours = (*books.outstanding, *range(books.next, opened.next))
        gaps = opened.next > books.next and any(n not in opened.units for n in ours)
        if ahead or gaps:
            _log.warning(
                "%s: attempt %d starts over from its unit %d, and what the streams hold is "
                "forgotten",
                "this checkpoint is older than what was committed"
                if ahead
                else "Redis no longer has some of the units that were asked for",
                *(opened.attempt, books.low),
            )
            await self.lease.run_async("reset", books.low, books.next)
        else:
            if self._resumed:
                await asyncio.to_thread(self._commit, self.state_dict())
            while len(books.waiting) < opened.next - books.next:
                books.waiting += await self._feed.draw()
            books.catch_up(opened.next, opened.units)
        # Whatever the server does not have: lost with its data, or dropped by a lost trainer.
        await self._ask(books.in_order(), True)
        self._committed_units = books.trained
        self._emptied = self.lease.emptied
        await self._read_again()
        self._is_open = True

    async def _read_again(self) -> None:
        """Reads what was read before, and is not acknowledged."""
        start = "0"
        while last := await self._read(start):
            start = last

    async def close(self, ended: str | None = None) -> None:
        """Acknowledges what is committed, and gives the run up. `ended` tells the actors that no
        more work will come, and why."""
        if self._uncommitted is not None:
            await asyncio.to_thread(self._retry_commit)
        await asyncio.to_thread(self.lease.close, ended)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Batches

    async def next_batch(self) -> SAWBatch:
        """The next batch. If one turns out empty, the next is tried, up to eight in all."""
        await self.open()
        return await first_filled(self._batch, _MAX_EMPTY)

    async def _batch(self, drops: Counter[str]) -> SAWBatch:
        before = Counter(self.ledger.dropped)
        began = time.monotonic()
        numbers = await self._collect()
        self._waited_s = time.monotonic() - began
        groups = [group for n in numbers if isinstance(group := self._groups[n], Group)]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        lags = [reading.lag_of(group, self.lease.version) for group in groups]
        if self.writer is not None:
            await write_rollouts(self.writer, rollouts)
        try:
            reading.count_failures(self._failures, groups)
        except RolloutError:  # once the cause is mended, a resumed run must not find them again
            meta = (await asyncio.to_thread(self.lease.store.facts))["meta"]
            await self.lease.run_async("reset", meta.get("low", 0), self.ledger.next)
            raise
        batch = batch_from_rollouts(
            rollouts,
            self.algorithm.credit_assigner,
            sample_filter=self.sample_filter,
            lost_member=self.lost_member,
            drops=drops,
            meta={
                "source_step": self.step,
                LOST_MEMBER: self.lost_member,
                "train/pipeline_attempt": self.lease.attempt,
                "perf/pipeline_wait_s": self._waited_s,
                "perf/pipeline_backlog": len(self._groups) - len(numbers),
                **reading.metrics_of(groups, lags, self.ledger.dropped - before),
            },
        )
        # Nothing is awaited from here on: a batch is settled as a whole, or not at all.
        self._lag = max(lags, default=0)
        self._bad.count = 0
        self.ledger.train(numbers)
        for number in numbers:
            del self._groups[number]
        self._feed.report(rollouts)
        self.step += 1
        return batch_of_any_age(batch)  # for the trainer: this source has bounded it by `judge`

    async def _collect(self) -> list[int]:
        """The numbers of the next batch's units, which have all arrived."""
        deadline = time.monotonic() + self.wait_s
        pause, ask_again = _POLL_S[0], time.monotonic() + _ASK_AGAIN_S
        if self._cut_short:  # an earlier call was cancelled, who knows where
            await self._ask(self.ledger.in_order(), True)
            await self._read_again()
        self._cut_short = True
        while True:
            self.alarm()
            if self._uncommitted is not None:
                await asyncio.to_thread(self._retry_commit)
            if self._emptied != self.lease.emptied or time.monotonic() > ask_again:
                self._emptied = self.lease.emptied  # the server may have lost what was asked for
                await self._ask((n for n in self.ledger.in_order() if n not in self._groups), True)
                ask_again = time.monotonic() + _ASK_AGAIN_S
            await self._ask_more()
            numbers, dropped = self._choose()
            if dropped:  # their room is free at once; their prompts are asked for next
                await self.lease.run_async("discard", *flat(dropped))
                await self._check_deadline(deadline)
                continue
            if len(numbers) == self.groups_per_update:
                self._cut_short = False
                return numbers
            if await self._read(">"):
                pause, ask_again = _POLL_S[0], time.monotonic() + _ASK_AGAIN_S
                continue
            await self._check_progress(deadline)
            await asyncio.sleep(pause)
            pause = min(pause * _SLOWER, _POLL_S[1])

    def _choose(self) -> tuple[list[int], list[tuple[int, str]]]:
        """Up to a batch's numbers from what has arrived, and those that had to be dropped, with
        their reasons."""
        chosen: list[int] = []
        dropped: list[tuple[int, str]] = []
        candidates = self.ledger.in_order() if self.in_order else iter(self._groups)
        for number in list(candidates):
            if number not in self._groups or len(chosen) == self.groups_per_update:
                break
            group = self._groups[number]
            if isinstance(group, reading.BadGroup):
                reason: str | None = group.reason
                self._bad.note(number, group)
            else:
                reason = reading.judge(group, self.lease.version, self.max_lag, self.stale)
            if reason is None:
                chosen.append(number)
                continue
            self.ledger.drop(number, reason)
            del self._groups[number]
            dropped.append((number, reason))
        return chosen, dropped

    async def _read(self, start: str) -> str:
        """Reads finished groups; returns the last entry, empty if there was none."""
        answer = await self.lease.run_async("read", start, _READ)
        groups = entries(answer[1])
        unread: dict[int, tuple[bytes, Unit]] = {}
        for _, number, message in groups:
            if number in self.ledger.outstanding and number not in self._groups:
                unread.setdefault(number, (message, self._unit(number)))
        self._groups |= await asyncio.to_thread(reading.open_groups, unread)
        return groups[-1][0] if groups else ""

    # Asking

    def _unit(self, number: int, newest: tuple[int, int] = (0, 0)) -> Unit:
        policy = self.lease.serial
        return self.ledger.unit(number, max_steps=self.max_steps, policy=policy, newest=newest)

    async def _ask_more(self) -> None:
        books = self.ledger
        assert self.bounds.groups is not None
        uncommitted = books.trained - self._committed_units
        room = self.bounds.groups - uncommitted - len(books.outstanding)
        if self.stale == "wait":
            room = min(room, self.groups_per_update * (1 + self.max_lag) - len(books.outstanding))
        if room <= 0:
            return
        while len(books.waiting) < room:
            books.waiting += await self._feed.draw()
        await self._ask([books.number(books.waiting.pop(0)) for _ in range(room)])

    async def _ask(self, numbers: Iterable[int], again: bool = False) -> None:
        rows = []
        lease, waits = self.lease, self.stale == "wait"
        newest = (lease.attempt, lease.version or 0) if waits else (0, 0)
        for number in numbers:
            of = self.ledger.outstanding[number].of
            unit = self._unit(number, newest)
            rows.append((number, "" if of is None else of, unit_message(unit)))
        for at in range(0, len(rows), _READ):
            part = flat(rows[at : at + _READ])
            await self.lease.run_async("ask", "again" if again else "new", *part)

    async def _check_progress(self, deadline: float) -> None:
        """Raises where no batch can come any more, or the deadline has passed."""
        books = self.ledger
        if not books.outstanding:
            raise PipelineError(
                f"{books.trained - self._committed_units} groups wait for a checkpoint, which is "
                f"as many as the bound allows ({self.bounds.groups}), and none has come: save "
                "checkpoints (TrainerConfig.checkpoint), or raise the bound (pipeline.max_groups)"
            )
        await self._check_deadline(deadline)

    async def _check_deadline(self, deadline: float) -> None:
        if time.monotonic() < deadline:
            return
        facts = await asyncio.to_thread(self.lease.store.facts)
        size = int(facts["meta"].get("bytes", 0))
        full = f", its {size:,} bytes are over the bound" if size >= self.bounds.bytes else ""
        raise DeadlineError(
            f"{self.groups_per_update} groups ({len(self._groups)} are there)",
            f"the {len(facts['actors'])} actors of the run {self.lease.config.run!r} on "
            f"{self.lease.config.shown} ({facts['requests']} units asked for, {facts['leased']} of "
            f"them taken{full}; dropped since the run began: {dict(self.ledger.dropped)})",
            self.wait_s,
        )

    # State

    def state_dict(self) -> Mapping[str, Any]:
        """What was trained on, what was asked for, and the curriculum's state."""
        return {
            "step": self.step,
            "attempt": self.lease.last_attempt,
            "ledger": self.ledger.state_dict(),
            "feed": self._feed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; must come before the first batch."""
        if self._is_open:
            raise CheckpointError("a PipelineBatchSource takes a state only before its first batch")
        try:
            step, books, feed = int(state["step"]), state["ledger"], state["feed"]
            attempt = int(state.get("attempt", 0))
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(f"not the state of a PipelineBatchSource: {exc!r}") from exc
        self.ledger = Ledger.of_state(books)
        self._feed.load_state_dict(feed)
        self.step, self._resumed = step, True
        self.lease.attempt_floor = max(self.lease.attempt_floor, attempt)

    def committed(self, state: Mapping[str, Any]) -> None:
        """Acknowledges what `state` has settled: the checkpoint that holds it is complete. A
        server that does not answer is asked again later; a resumed run does it, too. Any thread
        may call it."""
        try:
            self._commit(state, patience_s=self.lease.config.call_s)
        except LostRunError:
            raise
        except PipelineError as exc:
            _log.warning("a checkpoint is not acknowledged yet: %s", exc)
            self._uncommitted = state

    def _retry_commit(self) -> None:
        state, self._uncommitted = self._uncommitted, None
        if state is not None:
            self.committed(state)

    def _commit(self, state: Mapping[str, Any], patience_s: float | None = None) -> None:
        books = state["ledger"]
        counters = {name: books[name] for name in ("trained", "dropped", "next")}
        counters["step"] = state["step"]
        self.lease.run(
            *("commit", books["low"], json.dumps(counters), *books["settled"]),
            patience_s=patience_s,
        )
        self._committed_units = max(self._committed_units, int(books["trained"]))

    async def flush_record(self) -> None:
        """Returns when the rollouts so far are on disk, if they are written there."""
        if isinstance(self.writer, BufferedWriter):
            await self.writer.flush_async()

    def _facts(self) -> Mapping[str, Any]:
        return {
            "step": self.step,
            "version": self.lease.version,
            "lag": self._lag,
            "wait_s": round(self._waited_s, 3),
            "backlog": len(self._groups),
            "outstanding": len(self.ledger.outstanding),
            "trained": self.ledger.trained,
            "dropped": dict(self.ledger.dropped),
            "durability": self.lease.durability,
        }
