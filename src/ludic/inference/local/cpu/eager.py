"""Runs the model on a flat row of tokens, eagerly, on any device.

Exact: a number of rows that is known to give the same bits as any other such number, so that what a
row becomes depends on its own sequence only. Otherwise as many rows as there are tokens, and a
prompt's chunk in one attention problem.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ludic.inference.local.arena import SlotMemory
from ludic.inference.local.attention import SlotLayout
from ludic.inference.local.forward import Forward
from ludic.inference.local.noise import keyed_uniform
from ludic.inference.local.sampler import SamplingRows, draw, sample
from ludic.inference.local.scheduler import Outcome, Work

_AHEAD = 32
"""For how many tokens the noise of a steady batch is drawn at once."""


def _plainly_decodes(item: Work) -> bool:
    s = item.sequence
    return (
        item.count == 1
        and s.computed == len(s.tokens) - 1
        and s.sampling.temperature > 0
        and not s.is_special
        and not s.scores_prompt
    )


class SteadyBatch:
    """The tensors of a batch that only decodes, carried on from step to step."""

    def __init__(
        self,
        generation: int,
        work: Seq[Work],
        ids: list[int],
        positions: list[int],
        layout: SlotLayout,
        device: torch.device,
    ) -> None:
        n, padding = len(work), len(ids) - len(work)
        sequences = [item.sequence for item in work]
        self.generation, self.work, self.layout, self.count = generation, work, layout, n
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        temperatures = [1.0 / s.sampling.temperature for s in sequences] + [1.0] * padding
        self.plain = all(t == 1.0 for t in temperatures)
        self.inverse_temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self.keys = torch.tensor([s.key for s in sequences] + [0] * padding, device=device)
        self.at = torch.tensor([s.generated for s in sequences] + [0] * padding, device=device)
        self.noise: list[Tensor] = []
        self.ahead = torch.arange(_AHEAD, device=device)

    def step(self, logits: Tensor) -> tuple[list[int], list[float]]:
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
        return tokens[:n].tolist(), logprobs[:n].tolist()


class EagerRunner:
    """Rows beyond the work are padding that nobody reads.

    `row_sizes`: the numbers of rows that may be mixed without changing a bit; None: any number.
    """

    def __init__(self, forward: Forward, memory: SlotMemory, row_sizes: Seq[int] | None) -> None:
        self.forward, self.memory, self.row_sizes = forward, memory, row_sizes
        self.exact = row_sizes is not None
        self.device = memory.shape.device
        self._steady: SteadyBatch | None = None

    def __call__(self, work: Seq[Work]) -> list[Outcome]:
        self._steady = None
        return self._general(work)

    def decode(self, work: Seq[Work]) -> tuple[list[int], list[float]] | None:
        """A step in which every sequence takes one plainly sampled token, or None when it is not
        of that kind. Nothing is built anew while the same sequences go on."""
        steady, now = self._steady, self.memory.generation
        if steady is not None and steady.work is work and steady.generation == now:
            steady.layout.next_token()
        elif len(work) == self.memory.taken and all(_plainly_decodes(item) for item in work):
            ids, positions, layout = self._lay_out(work, self._rows_for(len(work)))
            steady = SteadyBatch(now, work, ids, positions, layout, self.device)
            self._steady = steady
        else:
            return None
        return steady.step(self.forward(steady.ids, steady.positions, steady.layout))

    def _general(self, work: Seq[Work]) -> list[Outcome]:
        total = sum(item.count for item in work)
        rows = self._rows_for(total)
        ids, positions, layout = self._lay_out(work, rows)
        needed = self._needed_rows(work)
        # Padded to a size that is known to change no bit; the padding repeats a row.
        padding = self._rows_for(len(needed)) - len(needed) if needed else 0
        logits = self.forward(
            torch.tensor([ids], device=self.device),
            torch.tensor([positions], device=self.device),
            layout,
            torch.tensor(needed + needed[-1:] * padding, dtype=torch.long, device=self.device),
        )
        return self._sample(work, logits, needed)

    def _rows_for(self, tokens: int) -> int:
        if self.row_sizes is None:
            return tokens
        return next(n for n in self.row_sizes if n >= tokens)

    def _lay_out(self, work: Seq[Work], rows: int) -> tuple[list[int], list[int], SlotLayout]:
        ids, positions = [0] * rows, [0] * rows
        shape = self.memory.shape
        layout = SlotLayout(rows, shape.kv_heads, shape.dtype, self.device, exact=self.exact)
        decodes: dict[int, tuple[list[int], list[int], list[int]]] = {}
        row = 0
        for item in work:
            s, first = item.sequence, item.sequence.computed
            end = first + item.count
            ids[row : row + item.count] = s.tokens[first:end]
            positions[row : row + item.count] = range(first, end)
            arena = s.arena
            assert arena is not None
            if item.count == 1 and self.memory.length_for(end) == arena.length:
                group = decodes.setdefault(arena.length, ([], [], []))
                for values, value in zip(group, (row, s.slot, first), strict=True):
                    values.append(value)
            else:
                for begin, stop, length in self._pieces(first, end, arena.length):
                    at = row + begin - first
                    layout.add_chunk(arena, s.slot, at, begin, length, stop - begin)
            row += item.count
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

    @staticmethod
    def _needed_rows(work: Seq[Work]) -> list[int]:
        """The rows whose logits somebody wants, in order."""
        needed: list[int] = []
        row = 0
        for item in work:
            if item.sequence.scores_prompt:
                needed.extend(range(row, row + item.count))
            elif item.samples:
                needed.append(row + item.count - 1)
            row += item.count
        return needed

    def _sample(self, work: Seq[Work], logits: Tensor, needed: list[int]) -> list[Outcome]:
        if not needed:
            return [Outcome() for _ in work]
        n = logits.shape[0]
        place = {row: i for i, row in enumerate(needed)}
        temperature, keys, at = [1.0] * n, [0] * n, [0] * n
        greedy, special, record, scored = [], [], [], {}
        row, last_rows = 0, []
        for item in work:
            s = item.sequence
            last = place.get(row + item.count - 1, -1) if item.samples else -1
            last_rows.append(last)
            t = s.sampling.temperature
            if s.scores_prompt:
                for i in range(item.count):
                    temperature[place[row + i]] = 1.0 / t if t else 1.0
                    if (target := s.computed + i + 1) < s.prompt_len:
                        scored[place[row + i]] = s.tokens[target]
            if last >= 0:
                temperature[last] = 1.0 / t if t else 1.0
                keys[last], at[last] = s.key, s.generated
                if t == 0:
                    greedy.append(last)
                if s.is_special:
                    special.append((last, s.sampling, s.tokens[: s.prompt_len], s.completion))
                    if s.returns.kept_ids and s.sampling.truncates:
                        record.append(last)
            row += item.count
        found = sample(
            logits,
            SamplingRows(
                torch.tensor(temperature, dtype=torch.float32, device=self.device),
                torch.tensor(keys, dtype=torch.long, device=self.device),
                torch.tensor(at, dtype=torch.long, device=self.device),
                greedy,
                special,
                record,
                scored,
            ),
        )
        tokens, logprobs = found.tokens.tolist(), found.logprobs.tolist()
        outcomes, row = [], 0
        for item, last in zip(work, last_rows, strict=True):
            scores: list[float] = []
            if item.sequence.scores_prompt:
                places = [place[row + i] for i in range(item.count)]
                scores = [found.scored[p] for p in places if p in found.scored]
            if last >= 0:
                outcomes.append(
                    Outcome(tokens[last], logprobs[last], found.kept.get(last, ()), scores)
                )
            else:
                outcomes.append(Outcome(scored=scores))
            row += item.count
        return outcomes
