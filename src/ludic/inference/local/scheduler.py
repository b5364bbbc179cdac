"""Which sequences are computed, and what happens after each step: admission, prefix sharing,
ending.

There are no threads here: the engine's thread owns a scheduler and calls `advance` until there is
no work. Steps are computed in `eager` and in `gpu/`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ludic.errors import InferenceError, OutOfMemoryError
from ludic.inference.local.arena import SlotMemory
from ludic.inference.local.prefix_store import PrefixStore, TokenOrder, common_prefix
from ludic.inference.local.sequence import Sequence
from ludic.types import ChatResponse


@dataclass(slots=True)
class Counters:
    """Totals since the engine began.

    Written by the engine's thread only. Other threads read them without a lock: each is one number
    that is replaced whole, but two of them may be from different steps.
    """

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    slot_steps: int = 0
    admitted: int = 0
    queue_seconds: float = 0.0
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    wait_seconds: float = 0.0
    updates: int = 0

    def as_stats(self, max_slots: int) -> dict[str, float]:
        """The totals and the rates that follow from them."""
        totals = asdict(self)
        for only_in_a_rate in ("slot_steps", "admitted", "queue_seconds"):
            del totals[only_in_a_rate]
        return {
            **totals,
            "tokens_per_s": self.generated_tokens / self.busy_seconds if self.busy_seconds else 0.0,
            "occupancy": self.slot_steps / max(1, self.steps * max_slots),
            "cache_hit_rate": self.reused_tokens / max(1, self.prompt_tokens),
            "queue_seconds_mean": self.queue_seconds / max(1, self.admitted),
        }


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


class Outcome(NamedTuple):
    """What a step found for one piece of work. NaN log-prob: the logits were not finite."""

    token: int | None = None
    logprob: float = 0.0
    kept: tuple[int, ...] = ()
    scored: Seq[float] = ()


class Scheduler:
    """Continuous batching over a `SlotMemory`. A subclass computes the steps, in `advance`.

    Everything but the counters, and the sizes that `stats()` reads, belongs to the engine's thread.
    `tokenizer` is used by that thread alone.
    """

    def __init__(
        self, memory: SlotMemory, store: PrefixStore[Any], tokenizer: Any, *, version: int = 0
    ) -> None:
        self.memory, self.store, self.tokenizer = memory, store, tokenizer
        decode = _decoder(tokenizer)
        self.decode = partial(decode, skip_special_tokens=True)  # without what ends a turn
        self.spell = partial(decode, skip_special_tokens=False)  # for stop strings
        self.version = version
        self.admitting = True
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._by_prompt = TokenOrder[Sequence]()
        self.counters = Counters()
        # Set by the engine's thread: a request left the queue; requests at hand may come in.
        self.on_admit: Callable[[], None] = lambda: None
        self.gather: Callable[[], None] = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self.running) or (self.admitting and bool(self.waiting))

    def advance(self) -> None:
        """Admits what fits, computes a step, and delivers what ended."""
        raise NotImplementedError

    def settle(self) -> None:
        """Reads whatever steps are in flight; where a step ends before the next one begins, none
        are."""

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Held by the thread that advances, for as long as it lives."""
        yield

    def forget(self) -> None:
        """New weights: nothing that was computed holds any longer."""
        self.store.clear()
        for sequence in self.running:
            sequence.computed, sequence.started = 0, False
            if sequence.scores_prompt:
                sequence.prompt_logprobs.clear()

    def abandon(self, error: Callable[[], BaseException]) -> None:
        """Ends every request that is here, without touching the memory: it may be in any state."""
        for sequence in self.running:
            sequence.deliver(error())
        self.running.clear()
        self._by_prompt.clear()
        while self.waiting:
            self.waiting.popleft().deliver(error())
            self.on_admit()

    # Admission

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self.running if s.cancelled]:
            self.counters.cancelled += 1
            # Nobody looked at its logits yet, perhaps: it may leave keys that are not finite.
            self._leave([sequence], wipe=True)
        self.drop_cancelled_waiting()

    def drop_cancelled_waiting(self) -> None:
        """Frees the queue places of cancelled requests; touches no memory."""
        # Looked at once each: a client may cancel another one at any moment.
        for sequence in [s for s in self.waiting if s.cancelled]:
            self.waiting.remove(sequence)
            self.counters.cancelled += 1
            self.on_admit()

    def _admit(self) -> None:
        put_off: list[Sequence] = []
        try:
            while self.waiting and len(self.running) < self.memory.max_slots:
                # It stays in the queue until it is admitted or refused, so none is lost.
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
        tokens = sequence.prompt
        entry, shared, donor = None, 0, None
        if not sequence.scores_prompt:
            usable = len(tokens) - 1
            entry, shared = self.store.find(tokens)
            shared = min(shared, usable)
            for other in self._by_prompt.neighbours(sequence.prompt_key):
                common = min(common_prefix(other.prompt, tokens), usable)
                if common <= shared:
                    continue
                missing = common - max(shared, other.computed)
                if missing >= _WORTH_SHARING and not other.scores_prompt:
                    return False
                common = min(common, other.computed)
                if common > shared:
                    entry, donor, shared = None, other, common
        if shared < _WORTH_SHARING:
            entry, donor, shared = None, None, 0
        self.memory.place(sequence, len(tokens))
        if donor is not None:
            self._copy_beginning(donor, sequence, shared)
        elif entry is not None:
            self._copy_kept(entry.kept, sequence, shared)
        sequence.computed = sequence.reused = shared
        sequence.admitted_at = time.monotonic()
        self.running.append(sequence)
        self._by_prompt.add(sequence.prompt_key, sequence)
        c = self.counters
        c.admitted += 1
        c.queue_seconds += sequence.admitted_at - sequence.submitted_at
        c.prompt_tokens += sequence.prompt_len
        c.reused_tokens += shared
        return True

    def _copy_beginning(self, donor: Sequence, sequence: Sequence, tokens: int) -> None:
        assert donor.arena is not None
        assert sequence.arena is not None
        sequence.arena.write(sequence.slot, donor.arena.read(donor.slot, tokens))

    def _copy_kept(self, kept: Any, sequence: Sequence, tokens: int) -> None:
        assert sequence.arena is not None
        sequence.arena.write(sequence.slot, kept[:, :, :, :tokens])

    # Steps

    def _take(self, work: Seq[Work], outcomes: Iterable[Outcome]) -> None:
        """Takes what a step found; those that end with it are delivered."""
        # All counts before any outcome: a sequence that leaves makes another one move, together
        # with all that is computed of it.
        for item in work:
            item.sequence.computed += item.count
        self._count_step()
        self._accept([item.sequence for item in work], outcomes)

    def _count_step(self) -> None:
        self.counters.steps += 1
        self.counters.slot_steps += len(self.running)

    def _accept(self, sequences: Seq[Sequence], outcomes: Iterable[Outcome]) -> None:
        ended: list[Sequence] = []
        for s, (token, logprob, kept, scored) in zip(sequences, outcomes, strict=True):
            arena = s.arena
            if arena is None:  # it left while this step was in flight
                continue
            if s.scores_prompt:
                if not s.prompt_logprobs:
                    s.prompt_logprobs.append(None)
                s.prompt_logprobs.extend(scored)
            if logprob != logprob or (scored and any(x != x for x in scored)):
                self._fail(s, not_finite(s.description))
            elif token is not None:
                s.accept(token, logprob, self.version, kept)
                self.counters.generated_tokens += 1
                # Most tokens end nothing and fit the slot: look closer only where one may not.
                if (
                    token in s.stop_ids
                    or len(s.tokens) - s.prompt_len >= s.limit
                    or len(s.tokens) > arena.length
                    or s.sampling.stop
                ) and self._ends(s):
                    ended.append(s)
        if ended:
            self._finish(ended)

    def _ends(self, sequence: Sequence) -> bool:
        """Whether the last token was the end. If not, there is a place for the next one, or the
        sequence has failed."""
        try:
            if sequence.check_end(self.spell) is not None:
                return True
            self.memory.place(sequence, len(sequence.tokens))
        except Exception as exc:
            self._fail(sequence, step_error(exc, sequence, by="the engine"))
        return False

    # Leaving

    def _finish(self, ended: Iterable[Sequence]) -> None:
        answers: list[tuple[Sequence, ChatResponse]] = []
        for s in ended:
            info = {
                "seed": s.seed,
                "reused_tokens": s.reused,
                "queue_seconds": s.admitted_at - s.submitted_at,
            }
            try:
                text = self.decode(s.completion) if s.returns.text else None
                answers.append((s, s.response(text, info)))
            except Exception as exc:
                self._fail(s, step_error(exc, s, by="the engine"))
        self.counters.finished += len(answers)
        try:
            self._retire([s for s, _ in answers])
        finally:  # even if the engine fails now, these are answered
            for s, answer in answers:
                s.deliver(answer)

    def _retire(self, sequences: Seq[Sequence]) -> None:
        """These have ended: what was computed of them is kept, and their slots are free."""
        # A cache: where there is no memory for it, the next request computes it again.
        with suppress(torch.OutOfMemoryError, MemoryError):
            self._keep(sequences)
        self._leave(sequences)

    def _keep(self, sequences: Seq[Sequence]) -> None:
        """Puts what was computed of these into the store, if there is memory for it."""
        for s in sequences:
            assert s.arena is not None
            tokens = s.known_tokens()
            self.store.add(tokens, s.arena.read(s.slot, len(tokens)).clone)

    def _turn_away(self, sequence: Sequence, exc: Exception) -> None:
        """Fails a sequence that could not join: it has a slot at most, the last one."""
        self.counters.failed += 1
        self.memory.release([sequence], wipe=True)
        sequence.deliver(step_error(exc, sequence, by="the engine"))

    def _fail_step(self, sequences: Iterable[Sequence], exc: Exception) -> None:
        """Fails those that were in a step that raised."""
        for sequence in list(sequences):
            self._fail(sequence, step_error(exc, sequence))

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        self.counters.failed += 1
        try:
            self._leave([sequence], wipe=True)
        finally:
            sequence.deliver(error)

    def _leave(self, sequences: Seq[Sequence], *, wipe: bool = False) -> list[tuple[int, int]]:
        """Those that go on may move; returns from which slot, to which."""
        leaving = set(sequences)
        self.running = [s for s in self.running if s not in leaving]
        for sequence in sequences:
            self._by_prompt.remove(sequence.prompt_key, sequence)
        return self.memory.release(sequences, wipe=wipe)


def chunks(prompts: Iterable[Sequence], room: int) -> list[Work]:
    """As much of the prompts as `room` tokens take, the first ones first."""
    work = []
    for sequence in prompts:
        if room <= 0:
            break
        count = min(room, len(sequence.tokens) - sequence.computed)
        work.append(Work(sequence, count))
        room -= count
    return work


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """The tokenizer's `decode`. That of `transformers` looks at its argument for ten times as long
    as decoding takes: where nothing else is done with the text, the backend decodes."""
    methods = [getattr(type(tokenizer), name, None) for name in ("decode", "_decode")]
    ordinary = all(
        getattr(method, "__module__", "").startswith("transformers.tokenization_utils")
        for method in methods
    )
    if ordinary and getattr(tokenizer, "clean_up_tokenization_spaces", True) is False:
        tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    decode: Callable[..., str] = tokenizer.decode
    return decode


def not_finite(what: str) -> InferenceError:
    return InferenceError(
        f"the model's logits for {what} are not finite (NaN or infinite): look for weights that "
        "diverged, or a token whose embedding is broken"
    )


def step_error(
    exc: Exception, sequence: Sequence, *, by: str = "the model"
) -> InferenceError | OutOfMemoryError:
    """The error of a request whose step raised, or its own part after the step."""
    error: InferenceError | OutOfMemoryError
    what = sequence.description
    if isinstance(exc, torch.OutOfMemoryError | MemoryError):
        error = OutOfMemoryError(
            f"the device ran out of memory while computing {what}: lower max_slots, "
            f"max_context_tokens or prefix_cache_tokens ({exc})"
        )
    else:
        error = InferenceError(f"{by} raised {type(exc).__name__} while computing {what}: {exc}")
    error.__cause__ = exc
    return error
