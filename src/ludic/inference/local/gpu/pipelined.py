"""The scheduler for a device that runs ahead: the host reads each step while the next ones run.

The engine's thread launches steps before it has read the results of the last ones, and lets prompts
join meanwhile. That is safe:

- A step takes nothing from the host: the tokens of step n are the input of step n + 1 on the
  device.
- Everything the engine does on the device is in one stream, so a slot that is freed, filled or
  moved while a step is in flight changes after that step.
- A flight remembers which sequence was in which row at launch. A finished sequence is answered at
  once and keeps its slot until others leave with it, or prompts join. What is computed for it
  meanwhile is dropped when it is read, and cleared from the slot (`_leave`).
- Weights are changed in another stream. So `settle` reads every step in flight before an update
  begins, and `updating()` waits for the updater's stream before the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ludic.inference.local.arena import SlotMemory, to_device
from ludic.inference.local.gpu.device_batch import DeviceBatch, split_results
from ludic.inference.local.gpu.kept_tokens import KeptTokens, Places
from ludic.inference.local.gpu.prefill import Prefill
from ludic.inference.local.prefix_store import PrefixStore
from ludic.inference.local.sampler import draw_outcomes
from ludic.inference.local.scheduler import Scheduler, Work, chunks, not_finite
from ludic.inference.local.sequence import Sequence
from ludic.memory.engine import MAX_TOKENS

_MOST_AHEAD = 4
"""At most so many steps are in flight, while the host is slower than the device."""
_JOIN_AFTER_STEPS = 12
"""A prompt waits at most so many decode steps for others to be computed with it."""
_SCORED_TOKENS = 512
"""How many tokens of prompts are scored at once: each needs a whole row of logits."""


class _Sheet:
    """Memory of the host that takes a step's results while the next steps run."""

    def __init__(self, results: Tensor) -> None:
        cuda = results.is_cuda
        self._host = torch.empty_like(results, device="cpu", pin_memory=cuda)
        self._tokens, self._logprobs = (part.numpy() for part in split_results(self._host))
        self._done = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    # Each call of torch frees the interpreter's lock, which the event loop may then hold for
    # milliseconds: so there are as few of them as can be.

    def copy_from(self, results: Tensor) -> None:
        self._host.copy_(results, non_blocking=True)
        if self._done is not None:
            self._done.record()

    @property
    def is_here(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def read(self, rows: int) -> tuple[list[int], list[float]]:
        """What the last `copy_from` copied, as soon as it is here."""
        if self._done is not None:
            self._done.synchronize()
        return self._tokens[:rows].tolist(), self._logprobs[:rows].tolist()


class _Flight(NamedTuple):
    """A step that was launched: who was in which slot, and where the results will be."""

    sequences: list[Sequence]
    sheet: _Sheet


class _Kept(NamedTuple):
    """What was kept of a sequence: where, and what it has in common with others."""

    places: Places
    beginning: object
    common: int


class PipelinedScheduler(Scheduler):
    """One arena, one slot per row, the decode step as a graph.

    `sequence.computed` counts what was launched, so it may be ahead of the tokens that the host
    has read. `running` are those that have not ended, as far as that is known.
    """

    def __init__(
        self,
        batch: DeviceBatch,
        prefill: Prefill,
        kept: KeptTokens,
        memory: SlotMemory,
        tokenizer: Any,
        *,
        version: int = 0,
    ) -> None:
        store = PrefixStore[_Kept](kept.max_tokens, on_drop=lambda gone: kept.drop(gone.places))
        super().__init__(memory, store, tokenizer, version=version)
        self.batch, self.prefill, self.kept = batch, prefill, kept
        self._flights: deque[_Flight] = deque()
        # Two more than flights: `advance` may launch two steps before it reads one.
        self._sheets = deque(_Sheet(batch.results) for _ in range(_MOST_AHEAD + 2))
        self._ahead = 1
        """How many steps may be in flight when the host looks for other work."""
        self._ended: list[Sequence] = []
        """They were answered, but still have their slots."""
        self._steps_waited = 0
        self._copies: dict[int, tuple[int, int]] = {}
        """Of those being admitted: from which slot each takes its first tokens, and how many."""
        self._taken: list[tuple[int, Places]] = []
        """Likewise: from which places of what was kept."""

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        if self.batch.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.batch.device):
            # First: a trainer on the same GPU has long kernels, which a step would queue behind.
            stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                yield

    def advance(self) -> None:
        """Lets prompts join when enough of them wait, then launches a step and reads the oldest."""
        self._drop_cancelled()
        if self.waiting and self.admitting and self._time_to_join():
            self._join_prompts()
        elif any(not s.started for s in self.running):
            self.settle()
            self._compute_prompts()
        if self.running and not self._can_run_ahead():
            self.settle()
            self._clear_out()
            if self.running:
                rows, length = self._sizes()
                self._compute(
                    [Work(s, 1) for s in self._in_slots()],
                    lambda work: self.batch.step_logits(rows, length),
                )
        elif self.running:
            self._launch()
            while len(self._flights) > self._ahead:
                self._read()
        if not self.running:
            self._flights.clear()  # nobody is left to hear of them
            self._clear_out()

    def settle(self) -> None:
        """Reads every step in flight."""
        while self._flights:
            self._read()
        if self.batch.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def forget(self) -> None:
        self.settle()
        self._clear_out()
        self.batch.graphs.drop_if_moved()
        super().forget()
        for sequence in self.running:
            sequence.beginning, sequence.common = None, 0

    # Prompts

    def _time_to_join(self) -> bool:
        free = self.memory.max_slots - len(self.running)
        if not free:
            return False
        self._steps_waited += 1
        enough = len(self.waiting) >= min(free, max(1, self.memory.max_slots // 8))
        return not self.running or enough or self._steps_waited > _JOIN_AFTER_STEPS

    def _join_prompts(self) -> None:
        self._steps_waited = 0
        if not self.running:
            # Requests arrive one by one from the event loop: a moment brings the rest of them.
            self.gather()
        elif self._can_run_ahead():
            self._launch()  # for the device to work on while the host plans
        while True:
            # First those that are here: others may be waiting for what they compute.
            self._compute_prompts()
            before = len(self.running)
            self._admit()
            if len(self.running) == before:
                return

    def _compute_prompts(self) -> None:
        begin = time.perf_counter()
        while True:
            # Decoding computes the last token of every prompt: so nothing is drawn here, and the
            # host waits for nothing.
            todo = [s for s in self.running if not s.started]
            self._start([s for s in todo if _has_one_token_left(s)])
            todo = [s for s in todo if not s.started]
            if not todo:
                break
            if scored := [s for s in todo if s.scores_prompt]:
                work = chunks(scored, _SCORED_TOKENS)
                ends = accumulate(item.count for item in work)
                self._compute(work, self.prefill.every_row, [end - 1 for end in ends])
                continue
            work = [Work(s, min(len(s.tokens) - s.computed - 1, MAX_TOKENS)) for s in todo]
            for part in self.prefill.batches(work):
                try:
                    self.prefill(part)
                except Exception as exc:
                    self._fail_step([item.sequence for item in part], exc)
                    continue
                for item in part:
                    item.sequence.computed += item.count
                self._count_step()
        self.counters.prefill_seconds += time.perf_counter() - begin

    def _compute(
        self,
        work: list[Work],
        logits_of: Callable[[list[Work]], Tensor],
        last_rows: Seq[int] | None = None,
    ) -> None:
        """A step that the host waits for. Row i of the logits is that of `work[i]`, unless
        `last_rows` says otherwise."""
        try:
            logits = logits_of(work)
            outcomes = draw_outcomes(work, logits, last_rows or range(len(work)))
        except Exception as exc:
            self._fail_step([item.sequence for item in work], exc)
            return
        self._take(work, outcomes)
        self._start([item.sequence for item in work if _has_one_token_left(item.sequence)])

    def _start(self, sequences: list[Sequence]) -> None:
        """From now on these decode in their slots."""
        for s in sequences:
            s.started = True
        self.batch.set_rows(sequences)
        if sequences:
            self._share()

    def _share(self) -> None:
        """Lets rows with the same beginning read it where the first of them has it."""
        first: dict[object, Sequence] = {}
        places: list[tuple[int, int]] = []
        for s in self._in_slots():
            other = s if s.beginning is None else first.setdefault(s.beginning, s)
            places.append((other.slot, 0 if other is s else min(s.common, other.common)))
        self.batch.share_rows(places)

    # Decoding

    def _can_run_ahead(self) -> bool:
        return all(s.is_plain and s.started for s in self.running)

    def _sizes(self) -> tuple[int, int]:
        return self.batch.sizes(len(self._in_slots()), self._longest() + 1)

    def _longest(self) -> int:
        return max([s.computed for s in self._in_slots()])

    def _in_slots(self) -> list[Sequence]:
        """Those that have a slot, in the order of their slots."""
        return cast(list[Sequence], self.batch.arena.tenants)

    def _launch(self) -> None:
        if self._longest() >= self.memory.max_tokens:
            # Those that ended run on until they leave, but not out of the context.
            self.settle()
            self._clear_out()
            if not self.running:
                return
        try:
            self.batch.step(*self._sizes())
            sheet = self._sheets[0]
            self._sheets.rotate()
            sheet.copy_from(self.batch.results)
        except Exception as exc:
            self._flights.clear()
            self._fail_step(self.running, exc)
            return
        sequences = self._in_slots().copy()
        for s in sequences:
            s.computed += 1
        self._count_step()
        self._flights.append(_Flight(sequences, sheet))

    def _read(self) -> None:
        flight = self._flights.popleft()
        # Results that were here already: the device is about to stand still, or does.
        late = flight.sheet.is_here
        self._ahead = min(self._ahead + 1, _MOST_AHEAD) if late else max(self._ahead - 1, 1)
        begin = time.perf_counter()
        tokens, logprobs = flight.sheet.read(len(flight.sequences))
        self.counters.wait_seconds += time.perf_counter() - begin
        ended: list[Sequence] = []
        taken = 0
        for s, token, logprob in zip(flight.sequences, tokens, logprobs, strict=True):
            if s.finished is not None or s.arena is None:  # it ended while this step was in flight
                continue
            if logprob != logprob:
                self._fail(s, not_finite(s.description))
                continue
            s.accept(token, logprob, self.version, ())
            taken += 1
            if (
                token in s.stop_ids or len(s.logprobs) >= s.limit or s.sampling.stop
            ) and self._ends(s):
                ended.append(s)
        self.counters.generated_tokens += taken
        if ended:
            self._finish(ended)

    # Sharing and keeping, in one copy for many: a launch takes as long as copying a short prompt.

    def _admit(self) -> None:
        self._clear_out()
        try:
            super()._admit()
        finally:
            # First what was kept: others may have joined that take it from these.
            taken, self._taken = self._taken, []
            self.kept.read(taken)
            copies, self._copies = self._copies, {}
            if copies:
                sources, lengths = zip(*copies.values(), strict=True)
                device, longest = self.batch.device, max(lengths)
                targets, origins, ends = to_device([list(copies), sources, lengths], device)
                part = self.batch.arena.kv[:, :, :, :, :longest]
                # Nobody has seen what the donors computed: beyond its end it may not be finite.
                beyond = torch.arange(longest, device=device) >= ends[:, None]
                copied = part[:, :, origins].masked_fill_(beyond[:, None, :, None], 0)
                part[:, :, targets] = copied

    def _copy_kept(self, kept: _Kept, sequence: Sequence, tokens: int) -> None:
        self._taken.append((sequence.slot, kept.places[:tokens]))
        sequence.beginning, sequence.common = kept.beginning, min(kept.common, tokens)

    def _copy_beginning(self, donor: Sequence, sequence: Sequence, tokens: int) -> None:
        # Nobody leaves or moves before `_admit` ends. A donor that still waits for its own copy has
        # nothing else yet.
        source, _ = self._copies.get(donor.slot, (donor.slot, 0))
        self._copies[sequence.slot] = source, tokens
        if tokens > donor.common:  # more than what the donor shares with others so far
            donor.beginning, donor.common = object(), donor.prompt_len
        sequence.beginning, sequence.common = donor.beginning, tokens

    def _keep(self, sequences: Seq[Sequence]) -> None:
        if not self.store.max_tokens:
            return
        try:
            for s in sequences:
                tokens = s.known_tokens()
                self.store.add(tokens, partial(self._kept_of, s, len(tokens)))
            self.kept.write()
        except BaseException as exc:
            self.store.clear()  # some entries may never have been written
            if isinstance(exc, torch.OutOfMemoryError | MemoryError):
                self.store.max_tokens = self.kept.room  # asking for more each time would be slow
            raise

    def _kept_of(self, s: Sequence, tokens: int) -> _Kept:
        places = self.kept.keep(s.slot, tokens)
        return _Kept(places, s.beginning, s.common) if s.common else _Kept(places, object(), tokens)

    # Leaving. Steps in flight computed tokens too many for those that end. Whatever they wrote,
    # finite or not, must not meet the slot's next tenant.

    def _retire(self, sequences: Seq[Sequence]) -> None:
        # Leaving takes as long for many as for one.
        self._ended += sequences
        ended = set(sequences)
        self.running = [s for s in self.running if s not in ended]
        if len(self._ended) > len(self.running) // 4:
            self._clear_out()

    def _clear_out(self) -> None:
        """Those that ended leave their slots."""
        ended, self._ended = self._ended, []
        if ended:
            super()._retire(ended)

    def _leave(self, sequences: Seq[Sequence], *, wipe: bool = False) -> list[tuple[int, int]]:
        batch, before = self.batch, len(self.batch.arena.tenants)
        ahead = [(s.slot, at) for s in sequences for at in range(len(s.tokens) - 1, s.computed)]
        if ahead:
            slots, positions = to_device(list(zip(*ahead, strict=True)), batch.device)
            batch.arena.kv[:, :, slots, :, positions] = 0
        moves = super()._leave(sequences, wipe=wipe)
        batch.move_rows(moves)
        tenants = len(batch.arena.tenants)
        batch.clear_rows(tenants, before)
        if moves:
            # What those that moved have sampled is not known yet, so neither is what they wrote.
            longest = max(self._in_slots()[target].computed for _, target in moves)
            batch.arena.kv[:, :, tenants:before, :, :longest] = 0
        if tenants:
            self._share()
        return moves


def _has_one_token_left(sequence: Sequence) -> bool:
    """Whether decoding can go on with it: all but its last token are in its slot."""
    return (
        sequence.arena is not None
        and sequence.computed == len(sequence.tokens) - 1
        and not sequence.scores_prompt
    )
