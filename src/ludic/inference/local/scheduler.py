"""Which tokens are computed next: admission, prefix sharing, and what became of each step.

No threads here: the engine's thread owns a scheduler and calls `advance` until there is no work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ludic.errors import InferenceError, OutOfMemoryError
from ludic.inference.local.arena import SlotMemory
from ludic.inference.local.prefix_store import PrefixStore, common_prefix
from ludic.inference.local.sequence import Sequence
from ludic.inference.local.stats import Counters

_WORTH_SHARING = 8
"""Fewer common tokens than this are computed again rather than looked for."""


@dataclass(frozen=True, slots=True)
class Work:
    """The next `count` tokens of a sequence, from `sequence.computed` on."""

    sequence: Sequence
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one is drawn."""
        return self.sequence.computed + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step found for one piece of work. NaN log-prob: the logits were not finite."""

    token: int | None = None
    logprob: float = 0.0
    kept: tuple[int, ...] = ()
    scored: Seq[float] = ()


class Runner(Protocol):
    """Runs the model on chosen tokens. `decode` is the short way for a step in which every sequence
    takes one plainly sampled token; it answers None when the step is not of that kind."""

    def __call__(self, work: Seq[Work]) -> Seq[Outcome]: ...

    def decode(self, work: Seq[Work]) -> tuple[list[int], list[float]] | None: ...


class Scheduler:
    """Continuous batching over a `SlotMemory`; `runner` computes the chosen tokens."""

    def __init__(
        self,
        runner: Runner,
        memory: SlotMemory,
        store: PrefixStore,
        *,
        decode: Callable[[list[int]], str],
        spell: Callable[[list[int]], str],
        describe: Callable[[Sequence], str],
        step_rows: int,
        version: int = 0,
    ) -> None:
        self.runner, self.memory, self.store = runner, memory, store
        self.decode, self.spell, self.describe = decode, spell, describe
        self.step_rows = step_rows
        self.version = version
        self.admitting = True
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = Counters()
        self.on_admit: Callable[[], None] = lambda: None
        self.gather: Callable[[], None] = lambda: None
        self._arrays: dict[int, np.ndarray] = {}
        self._steady: list[Work] | None = None
        self._steady_since = -1

    @property
    def has_work(self) -> bool:
        return bool(self.running) or (self.admitting and bool(self.waiting))

    def advance(self) -> None:
        """Admits what fits, computes one step, and delivers what ended."""
        self._drop_cancelled()
        if self.admitting:
            self._admit()
        work = self._plan()
        if work:
            self._run(work)

    def settle(self) -> None:
        """Waits for whatever a step left in flight; the eager way leaves nothing."""

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Held by the thread that advances, for as long as it lives."""
        yield

    def forget(self) -> None:
        """New weights: nothing that was computed holds any longer."""
        self.store.clear()
        self._steady = None
        for sequence in self.running:
            sequence.computed, sequence.started = 0, False
            if sequence.scores_prompt:
                sequence.prompt_logprobs.clear()

    def abandon(self, error: Callable[[], BaseException]) -> None:
        """Ends every request that is here, without touching the memory: it may be in any state."""
        for sequence in self.running:
            sequence.deliver(error())
        self.running.clear()
        while self.waiting:
            self.waiting.popleft().deliver(error())
            self.on_admit()

    # Admission

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self.running if s.cancelled]:
            self.counters.cancelled += 1
            # Nobody looked at its logits yet, perhaps: it may leave keys that are not finite.
            self._leave(sequence, wipe=True)
        self.drop_cancelled_waiting()

    def drop_cancelled_waiting(self) -> None:
        """Gives the queue places of cancelled requests back; touches no memory."""
        if any(s.cancelled for s in self.waiting):
            for _ in range(len(self.waiting)):
                sequence = self.waiting.popleft()
                if sequence.cancelled:
                    self.counters.cancelled += 1
                    self.on_admit()
                else:
                    self.waiting.append(sequence)

    def _admit(self) -> None:
        put_off: list[Sequence] = []
        try:
            while self.waiting and len(self.running) < self.memory.max_slots:
                # It stays in the queue until it is known what becomes of it: none is lost.
                sequence = self.waiting[0]
                try:
                    joined = self._join(sequence)
                except Exception as exc:
                    self._turn_away(sequence, exc)
                    joined = True
                self.waiting.popleft()
                if joined:
                    self.on_admit()
                else:
                    put_off.append(sequence)
                    if len(put_off) >= self.memory.max_slots:
                        break
        finally:
            self.waiting.extendleft(reversed(put_off))

    def _join(self, sequence: Sequence) -> bool:
        """Gives the sequence a slot, with what others computed of its beginning. False: somebody
        is computing that beginning right now, and it is cheaper to wait for it."""
        tokens = np.asarray(sequence.tokens, dtype=np.int64)
        entry, shared, donor = None, 0, None
        if not sequence.scores_prompt:
            usable = len(tokens) - 1
            entry, shared = self.store.find(tokens)
            shared = min(shared, usable)
            for other in self.running:
                if other.tokens[:_WORTH_SHARING] != sequence.tokens[:_WORTH_SHARING]:
                    continue
                common = min(common_prefix(self._arrays[id(other)], tokens), usable)
                if common <= shared:
                    continue
                if (
                    common - max(shared, other.computed) >= _WORTH_SHARING
                    and not other.scores_prompt
                ):
                    return False
                common = min(common, other.computed)
                if common > shared:
                    entry, donor, shared = None, other, common
        if shared < _WORTH_SHARING:
            entry, donor, shared = None, None, 0
        self.memory.place(sequence, len(tokens))
        assert sequence.arena is not None
        if donor is not None and donor.arena is not None:
            sequence.arena.write(sequence.slot, donor.arena.read(donor.slot, shared))
        elif entry is not None:
            sequence.arena.write(sequence.slot, entry.kv[:, :, :, :shared])
        sequence.computed = sequence.reused = shared
        sequence.admitted_at = time.monotonic()
        self._arrays[id(sequence)] = tokens
        self.running.append(sequence)
        c = self.counters
        c.admitted += 1
        c.queue_seconds += sequence.admitted_at - sequence.submitted_at
        c.prompt_tokens += sequence.prompt_len
        c.reused_tokens += shared
        return True

    # Steps

    def _plan(self) -> list[Work]:
        """Full prompt steps first, since they fill the batch; then decoding, with what is left of
        prompts in the free rows. A step has at most `step_rows` tokens."""
        if self._steady is not None and self._steady_since == self.memory.generation:
            return self._steady
        self._steady = None
        decoding = [s for s in self.running if s.computed == len(s.tokens) - 1]
        prompts = [s for s in self.running if s.computed < len(s.tokens) - 1]
        backlog = sum(len(s.tokens) - s.computed for s in prompts)
        if backlog >= self.step_rows:
            return self._chunks(prompts, self.step_rows)
        most = self.step_rows - bool(prompts)  # one row at least is the prompts'
        if len(decoding) > most:
            # More than one step takes: those that waited longest go first.
            decoding, behind = decoding[:most], decoding[most:]
            self.running = prompts + behind + decoding
        else:
            decoding.sort(key=_place_in_memory)
            if not prompts:
                # The same work until somebody comes, goes or moves.
                self._steady = [Work(s, 1) for s in decoding]
                self._steady_since = self.memory.generation
                return self._steady
        room = self.step_rows - len(decoding)
        return [Work(s, 1) for s in decoding] + self._chunks(prompts, room)

    @staticmethod
    def _chunks(prompts: Seq[Sequence], room: int) -> list[Work]:
        work = []
        for sequence in prompts:
            if room <= 0:
                break
            count = min(room, len(sequence.tokens) - sequence.computed)
            work.append(Work(sequence, count))
            room -= count
        return work

    def _run(self, work: Seq[Work]) -> None:
        try:
            drawn = self.runner.decode(work) if work is self._steady else None
            outcomes = self.runner(work) if drawn is None else ()
        except Exception as exc:
            for item in work:
                self._fail(item.sequence, step_error(exc, self.describe(item.sequence)))
            return
        c = self.counters
        c.steps += 1
        c.slot_steps += len(self.running)
        # All of them before any is taken: a sequence that leaves makes another move, with all that
        # is computed of it.
        for item in work:
            item.sequence.computed += item.count
        if drawn is not None:
            self.take_drawn([item.sequence for item in work], *drawn)
        else:
            for item, outcome in zip(work, outcomes, strict=True):
                self._take(item.sequence, outcome)

    def take_drawn(self, sequences: Seq[Sequence], tokens: Seq[int], logprobs: Seq[float]) -> None:
        """Takes a plain token for each sequence that is still here: `_take`, but quick."""
        version, counters = self.version, self.counters
        ended: list[Sequence] = []
        for s, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            arena = s.arena
            if arena is None:
                continue
            if logprob != logprob or s.returns.kept_ids or s.sampling.stop:
                self._take(s, Outcome(token, logprob))
                continue
            known = s.tokens
            known.append(token)
            s.logprobs.append(logprob)
            counters.generated_tokens += 1
            if not s.versions or s.versions[-1][1] != version:
                s.versions.append((s.generated - 1, version))
            if (
                token in s.stop_ids
                or len(known) - s.prompt_len >= s.limit
                or len(known) > arena.length
            ) and self._ends(s):
                ended.append(s)
        # From the last slot down: those that end together then leave no hole to be filled.
        for s in sorted(ended, key=lambda s: s.slot, reverse=True):
            self._finish(s)

    def _take(self, sequence: Sequence, outcome: Outcome) -> None:
        if sequence.scores_prompt:
            if not sequence.prompt_logprobs:
                sequence.prompt_logprobs.append(None)
            sequence.prompt_logprobs.extend(outcome.scored)
        if outcome.logprob != outcome.logprob or any(x != x for x in outcome.scored):
            self._fail(sequence, _not_finite(self.describe(sequence)))
        elif outcome.token is not None:
            sequence.accept(outcome.token, outcome.logprob, self.version, outcome.kept)
            self.counters.generated_tokens += 1
            if self._ends(sequence):
                self._finish(sequence)

    def _ends(self, sequence: Sequence) -> bool:
        """Whether the last token was the end. If not, there is a place for the next one, or the
        sequence has failed, by itself."""
        try:
            if sequence.check_end(self.spell) is not None:
                return True
            self.memory.place(sequence, len(sequence.tokens))
        except Exception as exc:
            self._fail(sequence, self._error(sequence, exc))
        return False

    # Leaving

    def _finish(self, sequence: Sequence) -> None:
        info = {
            "seed": sequence.seed,
            "reused_tokens": sequence.reused,
            "queue_seconds": sequence.admitted_at - sequence.submitted_at,
        }
        try:
            answer = sequence.response(self.decode(sequence.completion), info)
        except Exception as exc:
            self._fail(sequence, self._error(sequence, exc))
            return
        self._keep(sequence)
        self.counters.finished += 1
        try:
            self._leave(sequence)
        finally:  # whatever becomes of the engine, this one is answered
            sequence.deliver(answer)

    def _keep(self, sequence: Sequence) -> None:
        """Puts what was computed into the store, if there is memory for it."""
        assert sequence.arena is not None
        known = min(sequence.computed, len(sequence.tokens) - 1)
        kv = sequence.arena.read(sequence.slot, known)
        # A cache: without the entry the next request computes it again.
        with suppress(Exception):
            self.store.add(np.asarray(sequence.tokens[:known], dtype=np.int64), kv)

    def _turn_away(self, sequence: Sequence, exc: Exception) -> None:
        """Fails a sequence that could not join: it has a slot at most, the last one."""
        self.counters.failed += 1
        self.memory.release(sequence, wipe=True)
        sequence.deliver(self._error(sequence, exc))

    def _error(self, sequence: Sequence, exc: Exception) -> InferenceError | OutOfMemoryError:
        return step_error(exc, self.describe(sequence), by="the engine")

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        self.counters.failed += 1
        try:
            self._leave(sequence, wipe=True)
        finally:
            sequence.deliver(error)

    def _leave(self, sequence: Sequence, *, wipe: bool = False) -> None:
        self.running.remove(sequence)
        del self._arrays[id(sequence)]
        self.memory.release(sequence, wipe=wipe)


def _place_in_memory(sequence: Sequence) -> tuple[int, int]:
    """Sorted by this, the rows of a step run parallel to the slots."""
    return (sequence.arena.length if sequence.arena else 0, sequence.slot)


def _not_finite(what: str) -> InferenceError:
    return InferenceError(
        f"the model's logits for {what} are not finite (NaN or infinite): look for weights that "
        "diverged, or a token whose embedding is broken"
    )


def step_error(
    exc: Exception, what: str, *, by: str = "the model"
) -> InferenceError | OutOfMemoryError:
    """What a request hears when the step that it was in raised, or its own part after the step."""
    error: InferenceError | OutOfMemoryError
    if isinstance(exc, torch.OutOfMemoryError | MemoryError):
        error = OutOfMemoryError(
            f"the device ran out of memory while computing {what}: lower max_slots, "
            f"max_context_tokens or prefix_cache_tokens ({exc})"
        )
    else:
        error = InferenceError(f"{by} raised {type(exc).__name__} while computing {what}: {exc}")
    error.__cause__ = exc
    return error
