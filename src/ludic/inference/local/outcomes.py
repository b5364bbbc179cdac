"""From the logits of a step to what it found for each piece of work."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ludic.inference.local.sampler import SamplingRows, sample
from ludic.inference.local.scheduler import Outcome, Work
from ludic.inference.local.transfer import to_device


def draw_outcomes(work: Seq[Work], logits: Tensor, last_rows: Seq[int]) -> list[Outcome]:
    """Samples, with everything a request may ask for. Call it before `computed` goes on.

    `logits` is [rows, vocab]: `last_rows[i]` belongs to the last token of `work[i]`, and the rows
    before it to the tokens before, where its prompt is scored. Other rows are padding.
    """
    n = logits.shape[0]
    inverse_temperature, keys, at = [1.0] * n, [0] * n, [0] * n
    greedy, special, record, scored = [], [], [], {}
    for item, last in zip(work, last_rows, strict=True):
        s = item.sequence
        scale = 1.0 / (s.sampling.temperature or 1.0)
        if s.scores_prompt:
            first = last + 1 - item.count
            for row in range(first, last + 1):
                inverse_temperature[row] = scale
                if (target := s.computed + row - first + 1) < s.prompt_len:
                    scored[row] = s.tokens[target]
        if item.samples:
            inverse_temperature[last], keys[last], at[last] = scale, s.key, s.generated
            if s.sampling.temperature == 0:
                greedy.append(last)
            if s.is_special:
                special.append((last, s.sampling, s.tokens[: s.prompt_len], s.completion))
            if s.returns.kept_ids and s.sampling.truncates:
                record.append(last)
    rows = SamplingRows(
        to_device(inverse_temperature, logits.device, torch.float32),
        to_device(keys, logits.device),
        to_device(at, logits.device),
        greedy,
        special,
        record,
        scored,
    )
    found = sample(logits, rows)
    tokens, logprobs = found.tokens.tolist(), found.logprobs.tolist()
    outcomes = []
    for item, last in zip(work, last_rows, strict=True):
        its_rows = range(last + 1 - item.count, last + 1) if item.sequence.scores_prompt else ()
        scores = [found.scored[row] for row in its_rows if row in found.scored]
        if item.samples:
            kept = found.kept.get(last, ())
            outcomes.append(Outcome(tokens[last], logprobs[last], kept, scores))
        else:
            outcomes.append(Outcome(scored=scores))
    return outcomes
