"""Runs the model on a flat row of tokens, eagerly, on any device.

Exact: always the same number of rows, so that each row's bits depend on its own sequence only.
Otherwise as many rows as there are tokens, the head on the rows that need it, and a prompt's chunk
in one attention problem.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from ludic.inference.local.arena import SlotMemory
from ludic.inference.local.attention import SlotLayout, layout_in_use
from ludic.inference.local.sampler import SamplingRows, sample
from ludic.inference.local.scheduler import Outcome, Work


class EagerRunner:
    """`view` is a `module_view`; rows beyond the work are padding that nobody reads."""

    def __init__(self, view: Any, memory: SlotMemory, *, exact: bool, step_rows: int) -> None:
        self.view, self.memory, self.exact, self.step_rows = view, memory, exact, step_rows
        self.device = memory.shape.device
        # A mask of four dimensions is passed through untouched; ours are made in the layout.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        self._none = torch.zeros(0, dtype=torch.long, device=self.device)

    def __call__(self, work: Seq[Work]) -> list[Outcome]:
        total = sum(item.count for item in work)
        rows = max(self.step_rows, total) if self.exact else total
        ids, positions, layout = self._lay_out(work, rows)
        needed = self._needed_rows(work)
        logits = self.forward(ids, positions, layout, needed, rows)
        if logits is None:
            return [Outcome() for _ in work]
        return self._sample(work, logits, needed)

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
        for length, (at_rows, slots, at) in decodes.items():
            layout.add_decodes(self.memory.arena(length), at_rows, slots, at)
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
        needed, row = [], 0
        for item in work:
            if item.sequence.scores_prompt:
                needed.extend(range(row, row + item.count))
            elif item.samples:
                needed.append(row + item.count - 1)
            row += item.count
        return needed

    def forward(
        self, ids: list[int], positions: list[int], layout: Any, needed: list[int], rows: int
    ) -> Tensor | None:
        """Logits [rows, vocab] in exact mode, else [needed rows, vocab]; None if nobody asks."""
        keep: int | Tensor = self._none
        if needed:
            keep = 0 if self.exact else torch.tensor(needed, device=self.device)
        with layout_in_use(layout):
            logits = self.view(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=keep,
            ).logits[0]
        return logits if needed else None

    def _sample(self, work: Seq[Work], logits: Tensor, needed: list[int]) -> list[Outcome]:
        n = logits.shape[0]
        place = {row: row if self.exact else i for i, row in enumerate(needed)}
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
