"""Runs the model on a flat row of tokens, eagerly, on any device.

In the exact mode a step has a number of rows known to give the same bits as the other allowed
numbers, so a row's result depends only on its own sequence. Otherwise it has as many rows as there
are tokens, and a prompt's chunk is one attention problem.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from ludic.inference.local.attention import SlotLayout
from ludic.inference.local.sampler import draw, draw_outcomes
from ludic.inference.local.scheduler import Outcome, Scheduler, Work, chunks
from ludic.inference.local.sequence import Sequence
from ludic.inference.local.view import Forward
from ludic.seeding import keyed_uniform

_AHEAD = 32
"""For how many tokens the noise of a steady batch is drawn at once."""


class SteadyBatch:
    """The tensors of a batch that only decodes, carried on from step to step."""

    def __init__(
        self,
        work: Seq[Work],
        ids: list[int],
        positions: list[int],
        layout: SlotLayout,
        device: torch.device,
    ) -> None:
        n, padding = len(work), len(ids) - len(work)
        sequences = [item.sequence for item in work]
        self.work, self.layout, self.count = work, layout, n
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        temperatures = [1.0 / s.sampling.temperature for s in sequences] + [1.0] * padding
        self.plain = all(t == 1.0 for t in temperatures)
        self.inverse_temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self.keys = torch.tensor([s.key for s in sequences] + [0] * padding, device=device)
        self.at = torch.tensor([s.generated for s in sequences] + [0] * padding, device=device)
        self.noise: list[Tensor] = []
        self.ahead = torch.arange(_AHEAD, device=device)

    def draw(self, logits: Tensor) -> list[Outcome]:
        """Samples, and makes the tokens the next step's input."""
        if not self.noise:
            noise = keyed_uniform(
                self.keys[:, None].expand(-1, _AHEAD), self.at[:, None] + self.ahead
            )
            self.noise = list(noise.T.contiguous().flip(0).unbind())
            self.at += _AHEAD
        # Multiplying by one changes no bit, so leaving it out changes none either.
        scaled = logits.float() if self.plain else logits * self.inverse_temperature[:, None]
        tokens, logprobs = draw(scaled, self.noise.pop())
        n = self.count
        self.ids[0, :n] = tokens[:n]
        self.positions[0, :n] += 1
        return list(map(Outcome, tokens[:n].tolist(), logprobs[:n].tolist()))


class EagerScheduler(Scheduler):
    """Steps of at most `step_rows` tokens, prompts and decoding mixed.

    `row_sizes`: the numbers of rows that may be mixed without changing a bit; None: any number.
    Rows beyond the work are padding that nobody reads.
    """

    def __init__(
        self,
        forward: Forward,
        row_sizes: Seq[int] | None,
        *args: Any,
        step_rows: int,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.forward, self.row_sizes, self.step_rows = forward, row_sizes, step_rows
        self.exact = row_sizes is not None
        self.device = self.memory.shape.device
        self._batch: SteadyBatch | None = None
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
            outcomes = self.decode_step(work) if work is self._steady else None
            if outcomes is None:
                outcomes = self.compute(work)
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

    def compute(self, work: Seq[Work]) -> list[Outcome]:
        """A step with any mixture of work."""
        self._batch = None
        ids, positions, layout = self._lay_out(work, self._rows_for(sum(w.count for w in work)))
        needed: list[int] = []  # the rows whose logits somebody wants, in order
        last_rows: list[int] = []
        row = 0
        for item in work:
            row += item.count
            if item.sequence.scores_prompt:
                needed.extend(range(row - item.count, row))
            elif item.samples:
                needed.append(row - 1)
            last_rows.append(len(needed) - 1)
        # Padded to a size that is known to change no bit; the padding repeats a row.
        padding = self._rows_for(len(needed)) - len(needed) if needed else 0
        logits = self.forward(
            torch.tensor([ids], device=self.device),
            torch.tensor([positions], device=self.device),
            layout,
            torch.tensor(needed + needed[-1:] * padding, dtype=torch.long, device=self.device),
        )
        if not needed:
            return [Outcome() for _ in work]
        return draw_outcomes(work, logits, last_rows)

    def decode_step(self, work: Seq[Work]) -> list[Outcome] | None:
        """A step in which every sequence takes one plainly sampled token, or None when it is not
        of that kind. `work` has one row for each slot that is taken, and is the same list for as
        long as nobody comes, goes or moves: nothing is built anew meanwhile."""
        steady = self._batch
        if steady is not None and steady.work is work:
            steady.layout.next_token()
        elif all(w.sequence.is_plain and not w.sequence.scores_prompt for w in work):
            ids, positions, layout = self._lay_out(work, self._rows_for(len(work)))
            self._batch = steady = SteadyBatch(work, ids, positions, layout, self.device)
        else:
            return None
        return steady.draw(self.forward(steady.ids, steady.positions, steady.layout))

    def _rows_for(self, tokens: int) -> int:
        if self.row_sizes is None:
            return tokens
        return next(n for n in self.row_sizes if n >= tokens)

    def _lay_out(self, work: Seq[Work], rows: int) -> tuple[list[int], list[int], SlotLayout]:
        ids, positions = [0] * rows, [0] * rows
        layout = SlotLayout(rows, self.device, exact=self.exact)
        decodes: dict[int, tuple[list[int], list[int], list[int]]] = {}
        row = 0
        for item in work:
            s, count = item.sequence, item.count
            first, arena = s.computed, s.arena
            end = first + count
            assert arena is not None
            if count == 1 and self.memory.length_for(end) == arena.length:
                ids[row], positions[row] = s.tokens[first], first
                if arena.length not in decodes:
                    decodes[arena.length] = [], [], []
                its_rows, slots, places = decodes[arena.length]
                its_rows.append(row)
                slots.append(s.slot)
                places.append(first)
            else:
                ids[row : row + count] = s.tokens[first:end]
                positions[row : row + count] = range(first, end)
                for begin, stop, length in self._pieces(first, end, arena.length):
                    at = row + begin - first
                    layout.add_chunk(arena, s.slot, at, begin, length, stop - begin)
            row += count
        for length, (its_rows, slots, places) in decodes.items():
            layout.add_decodes(self.memory.arena(length), its_rows, slots, places)
        return ids, positions, layout

    def _pieces(self, first: int, end: int, slot_length: int) -> list[tuple[int, int, int]]:
        """A chunk cut where the attended length changes: (from, to, length)."""
        if not self.exact:
            return [(first, end, min(-(-end // 64) * 64, slot_length))]
        pieces = []
        while first < end:
            length = self.memory.length_for(first + 1)
            stop = min(end, length)
            pieces.append((first, stop, length))
            first = stop
        return pieces


def _place_in_memory(sequence: Sequence) -> tuple[int, int]:
    """Sorted by this, the rows of a step run parallel to the slots."""
    return (sequence.arena.length if sequence.arena else 0, sequence.slot)
