"""The scheduler for a device that runs ahead: the host reads each step while the next one runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ludic.inference.local.gpu.device_batch import DeviceBatch
from ludic.inference.local.gpu.prefill import Prefill
from ludic.inference.local.sampler import Sampled, SamplingRows, sample
from ludic.inference.local.scheduler import Outcome, Scheduler, Work, step_error
from ludic.inference.local.sequence import Sequence

_JOIN_AFTER_STEPS = 12
"""A prompt waits at most so many decode steps for others to be computed with it."""


@dataclass(slots=True)
class _Flight:
    """A step that was launched: who was in which slot, and where the results will be."""

    sequences: list[Sequence]
    tokens: Tensor
    logprobs: Tensor
    done: torch.cuda.Event | None


class PipelinedScheduler(Scheduler):
    """One arena, one slot per row, the decode step as a graph.

    `sequence.computed` counts what was launched, so it may be ahead of the tokens that the host
    has read by one.
    """

    def __init__(self, batch: DeviceBatch, prefill: Prefill, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batch, self.prefill = batch, prefill
        self._flights: deque[_Flight] = deque()
        self._steps_waited = 0

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        if self.batch.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.batch.device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                yield

    def advance(self) -> None:
        """Lets prompts join when enough of them wait, then launches a step and reads the last."""
        self._drop_cancelled()
        if self.waiting and self.admitting and self._time_to_join():
            self._join_prompts()
        elif any(not s.started for s in self.running):
            self.settle()
            self._compute_prompts()
        if not self.running:
            self.settle()
            return
        if any(s.is_special or s.sampling.temperature == 0 for s in self.running):
            self.settle()
            if self.running:
                self._step_and_wait()
            return
        try:
            self._launch()
        except Exception as exc:
            self._fail_running(exc)
            return
        while len(self._flights) > 1:
            self._read()

    def settle(self) -> None:
        """Reads every step in flight."""
        while self._flights:
            self._read()
        if self.batch.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def forget(self) -> None:
        self.settle()
        self.batch.graphs.drop_if_moved()
        super().forget()

    # Prompts

    def _time_to_join(self) -> bool:
        free = self.memory.max_slots - len(self.running)
        if not free:
            return False
        self._steps_waited += 1
        enough = len(self.waiting) >= min(free, max(1, self.memory.max_slots // 8))
        return not self.running or enough or self._steps_waited > _JOIN_AFTER_STEPS

    def _join_prompts(self) -> None:
        self.settle()
        self._steps_waited = 0
        if not self.running:
            # Requests arrive one by one from the event loop: a moment brings the rest of them.
            self.gather()
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
            todo = [s for s in self.running if not s.started]
            if not todo:
                break
            scored = [s for s in todo if s.scores_prompt]
            if scored:
                self._run(self._chunks(scored, self.step_rows))
                self._mark_started(scored)
                continue
            most = self.prefill.max_tokens
            work = [Work(s, min(len(s.tokens) - s.computed, most)) for s in todo]
            for part in self.prefill.batches(work):
                self._run_prefill(part)
        self.counters.prefill_seconds += time.perf_counter() - begin

    def _run_prefill(self, work: list[Work]) -> None:
        try:
            logits = self.prefill(work)
            found = self._sample([w.sequence if w.samples else None for w in work], logits)
            tokens, logprobs = found.tokens.tolist(), found.logprobs.tolist()
        except Exception as exc:
            for item in work:
                self._fail(item.sequence, step_error(exc, self.describe(item.sequence)))
            return
        samples = [item.samples for item in work]
        for item in work:
            item.sequence.computed += item.count
        self.counters.steps += 1
        self.counters.slot_steps += len(self.running)
        for i, item in enumerate(work):
            if samples[i]:
                outcome = Outcome(tokens[i], logprobs[i], found.kept.get(i, ()))
                self._take(item.sequence, outcome)
        self._mark_started([item.sequence for i, item in enumerate(work) if samples[i]])

    def _mark_started(self, sequences: list[Sequence]) -> None:
        """Those that have their first token and go on: their slots decode from now on."""
        ready = [s for s in sequences if s.arena is not None and s.computed == len(s.tokens) - 1]
        for s in ready:
            s.started = True
        self.batch.set_rows(ready)

    def _sample(self, sequences: list[Sequence | None], logits: Tensor) -> Sampled:
        """Samples row i for sequence i, on the device, with everything a request may ask for."""
        t = [1.0 / (s.sampling.temperature or 1.0) if s else 1.0 for s in sequences]
        to_device = self.batch.to_device
        live = [(i, s) for i, s in enumerate(sequences) if s is not None]
        return sample(
            logits,
            SamplingRows(
                to_device(t, torch.float32),
                to_device([s.key if s else 0 for s in sequences]),
                to_device([s.generated if s else 0 for s in sequences]),
                [i for i, s in live if s.sampling.temperature == 0],
                [
                    (i, s.sampling, s.tokens[: s.prompt_len], s.completion)
                    for i, s in live
                    if s.is_special
                ],
                [i for i, s in live if s.returns.kept_ids and s.sampling.truncates],
            ),
        )

    # Decoding

    def _sizes(self) -> tuple[int, int]:
        longest = max(s.computed for s in self.running) + 1
        return self.batch.sizes(len(self.running), min(longest, self.batch.arena.length))

    def _launch(self) -> None:
        rows, length = self._sizes()
        self.batch.step(rows, length)
        sequences = list(self.batch.arena.sequences)
        n = len(sequences)
        cuda = self.batch.device.type == "cuda"
        tokens = torch.empty(n, dtype=torch.long, pin_memory=cuda)
        logprobs = torch.empty(n, dtype=torch.float32, pin_memory=cuda)
        tokens.copy_(self.batch.tokens[:n], non_blocking=cuda)
        logprobs.copy_(self.batch.logprobs[:n], non_blocking=cuda)
        done = None
        if cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        for s in sequences:
            s.computed += 1
        self.counters.steps += 1
        self.counters.slot_steps += n
        self._flights.append(_Flight(sequences, tokens, logprobs, done))

    def _read(self) -> None:
        flight = self._flights.popleft()
        begin = time.perf_counter()
        if flight.done is not None:
            flight.done.synchronize()
        self.counters.wait_seconds += time.perf_counter() - begin
        tokens, logprobs = flight.tokens.tolist(), flight.logprobs.tolist()
        self.take_drawn(flight.sequences, tokens, logprobs)

    def _step_and_wait(self) -> None:
        rows, length = self._sizes()
        sequences = list(self.batch.arena.sequences)
        try:
            logits = self.batch.step_logits(rows, length)
            padded = [*sequences, *[None] * (rows - len(sequences))]
            found = self._sample(padded, logits)
            self.batch.carry_on(rows, found.tokens)
            tokens, logprobs = found.tokens.tolist(), found.logprobs.tolist()
        except Exception as exc:
            self._fail_running(exc)
            return
        for s in sequences:
            s.computed += 1
        self.counters.steps += 1
        self.counters.slot_steps += len(sequences)
        for i, s in enumerate(sequences):
            self._take(s, Outcome(tokens[i], logprobs[i], found.kept.get(i, ())))

    def _fail_running(self, exc: Exception) -> None:
        self._flights.clear()
        for sequence in list(self.running):
            self._fail(sequence, step_error(exc, self.describe(sequence)))

    def _leave(self, sequence: Sequence, *, wipe: bool = False) -> None:
        slot, last = sequence.slot, len(self.batch.arena.sequences) - 1
        # A step in flight computed one token too many. Whatever it wrote, finite or not, must not
        # meet the slot's next tenant.
        self.batch.arena.kv[:, :, slot, :, len(sequence.tokens) - 1 : sequence.computed] = 0
        super()._leave(sequence, wipe=wipe)
        if slot != last:
            self.batch.move_row(last, slot)
        self.batch.clear_row(last)
