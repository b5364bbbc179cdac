"""Which tokens make up the next step, where each step ends before the next one begins."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from ludic.inference.local.scheduler import Outcome, Scheduler, Work, chunks
from ludic.inference.local.sequence import Sequence


class Runner(Protocol):
    """Runs the model on chosen tokens. `decode` is the short way for a step in which every sequence
    takes one plainly sampled token; it returns None when the step is not of that kind."""

    def __call__(self, work: Seq[Work]) -> list[Outcome]: ...

    def decode(self, work: Seq[Work]) -> list[Outcome] | None: ...


class EagerScheduler(Scheduler):
    """Steps of at most `step_rows` tokens, prompts and decoding mixed; `runner` computes them."""

    def __init__(self, runner: Runner, *args: Any, step_rows: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.runner, self.step_rows = runner, step_rows
        self._steady: list[Work] | None = None
        self._steady_since = -1

    def advance(self) -> None:
        self._drop_cancelled()
        if self.admitting:
            self._admit()
        work = self._plan()
        if not work:
            return
        try:
            outcomes = self.runner.decode(work) if work is self._steady else None
            if outcomes is None:
                outcomes = self.runner(work)
        except Exception as exc:
            self._fail_step([item.sequence for item in work], exc)
            return
        self._take(work, outcomes)

    def forget(self) -> None:
        self._steady = None
        super().forget()

    def _plan(self) -> list[Work]:
        """Full prompt steps first, since they fill the batch; then decoding, with what is left of
        prompts in the free rows."""
        if self._steady is not None and self._steady_since == self.memory.generation:
            return self._steady
        self._steady = None
        decoding = [s for s in self.running if s.computed == len(s.tokens) - 1]
        prompts = [s for s in self.running if s.computed < len(s.tokens) - 1]
        backlog = sum(len(s.tokens) - s.computed for s in prompts)
        if backlog >= self.step_rows:
            return chunks(prompts, self.step_rows)
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
        return [Work(s, 1) for s in decoding] + chunks(prompts, room)


def _place_in_memory(sequence: Sequence) -> tuple[int, int]:
    """Sorted by this, the rows of a step run parallel to the slots."""
    return (sequence.arena.length if sequence.arena else 0, sequence.slot)
