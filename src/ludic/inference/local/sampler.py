"""From a step's logits to one token and its log-prob per row, in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from ludic.inference.local.arena import to_device
from ludic.inference.local.scheduler import Outcome, Work
from ludic.inference.sampling import SamplingConfig
from ludic.seeding import keyed_uniform

BELOW_ONE = 1 - 1e-12


@dataclass(slots=True)
class SamplingRows:
    """The sampling side of a step: one entry per row of logits.

    `special` lists the rows whose distribution needs more than a temperature, with the tokens that
    penalties count: (row, config, prompt ids, completion ids).
    """

    inverse_temperature: Tensor
    keys: Tensor
    positions: Tensor
    greedy: Sequence[int] = ()
    special: Sequence[tuple[int, SamplingConfig, Sequence[int], Sequence[int]]] = ()
    record_kept: Sequence[int] = ()
    scored: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens and log-probs per row; NaN log-prob marks logits that were not finite.

    `kept` has the ids left by truncation, for the rows that asked; `scored` the log-prob of each
    row's given token under the plain distribution at the row's temperature.
    """

    tokens: Tensor
    logprobs: Tensor
    kept: Mapping[int, tuple[int, ...]]
    scored: Mapping[int, float]


@cache
def _block(vocab: int) -> int:
    """A divisor of the vocabulary near its square root: sums of blocks find the place quickly."""
    if vocab <= 4096:
        return vocab
    divisors = [d for d in range(64, 4097) if vocab % d == 0]
    return min(divisors, key=lambda d: abs(d - vocab**0.5), default=vocab)


def invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at `uniform` [rows] of each row's distribution function; `probs` is [rows, vocab].

    First among sums of blocks, then inside one block: two short searches instead of a running sum
    over the whole vocabulary. A token of probability zero is never drawn.
    """
    rows, vocab = probs.shape
    block = _block(vocab)
    if block == vocab:
        return _place(probs, uniform * BELOW_ONE)
    blocks = probs.view(rows, vocab // block, block)
    sums = blocks.sum(-1).double()
    upto = sums.cumsum(-1)
    target = uniform * BELOW_ONE * upto[:, -1]
    index = torch.searchsorted(upto, target[:, None], right=True)[:, 0]
    index = index.clamp_(max=vocab // block - 1)
    size = sums.gather(1, index[:, None])[:, 0]
    before = upto.gather(1, index[:, None])[:, 0] - size
    fraction = ((target - before) / size).clamp_(0.0, BELOW_ONE)
    inner = blocks.gather(1, index[:, None, None].expand(rows, 1, block))[:, 0]
    return index * block + _place(inner, fraction)


def _place(weights: Tensor, fraction: Tensor) -> Tensor:
    """The index at which a row's running sum passes `fraction` of its total."""
    upto = weights.double().cumsum(-1)
    target = (fraction * upto[:, -1])[:, None]
    index = torch.searchsorted(upto, target, right=True)[:, 0]
    return index.clamp_(max=weights.shape[1] - 1)


def draw(scaled: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs for float32 logits already divided by the temperature."""
    probs = torch.softmax(scaled, -1)
    tokens = invert(probs, uniform)
    # NaN anywhere in the row makes the whole softmax NaN, and so this log-prob.
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """Samples every row of `logits` [rows, vocab]; rows that nobody asked for are drawn as well."""
    kept: dict[int, tuple[int, ...]] = {}
    scored: dict[int, float] = {}
    scaled = logits * rows.inverse_temperature[:, None]
    if rows.scored:
        # Over all rows, so that the shape, and with it every bit, is that of any other step.
        plain = torch.log_softmax(scaled, -1)
        at = torch.tensor(list(rows.scored), device=logits.device)
        ids = torch.tensor(list(rows.scored.values()), device=logits.device)
        scored = dict(zip(rows.scored, plain[at, ids].tolist(), strict=True))
    for row, config, prompt, completion in rows.special:
        row_logits = logits[row].float()
        if config.penalises:
            row_logits = penalise(row_logits, config, prompt, completion)
        row_logits = row_logits * rows.inverse_temperature[row]
        if config.truncates:
            row_logits = truncate(row_logits, config)
        scaled[row] = row_logits
    for row in rows.record_kept:
        kept[row] = tuple(torch.nonzero(scaled[row] > float("-inf"))[:, 0].tolist())
    tokens, logprobs = draw(scaled, keyed_uniform(rows.keys, rows.positions))
    if rows.greedy:
        at = torch.tensor(list(rows.greedy), device=logits.device)
        tokens[at] = scaled[at].argmax(-1)
        # A choice without chance has probability one; NaN stays NaN.
        logprobs[at] = torch.where(logprobs[at].isnan(), torch.nan, 0.0)
    return Sampled(tokens, logprobs, kept, scored)


def penalise(
    logits: Tensor, config: SamplingConfig, prompt: Sequence[int], completion: Sequence[int]
) -> Tensor:
    """Presence and frequency count the completion; repetition the prompt as well."""
    logits = logits.clone()
    completed = torch.tensor(list(completion), dtype=torch.long, device=logits.device)
    if config.repetition_penalty != 1:
        ids = torch.tensor(sorted({*prompt, *completion}), device=logits.device)
        value = logits[ids]
        r = config.repetition_penalty
        logits[ids] = torch.where(value > 0, value / r, value * r)
    counts = torch.bincount(completed, minlength=logits.shape[0]).to(logits.dtype)
    return (
        logits - config.frequency_penalty * counts - config.presence_penalty * (counts > 0).float()
    )


def truncate(scaled: Tensor, config: SamplingConfig) -> Tensor:
    """Top-k, then top-p of what is left, then min-p against the likeliest; the rest is -inf.

    Ties are broken by the smaller id, so that what is kept never depends on the sort.
    """
    values, order = scaled.sort(descending=True, stable=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if config.top_k:
        keep[config.top_k :] = False
    if config.top_p < 1:
        probs = torch.softmax(values.masked_fill(~keep, float("-inf")).double(), -1)
        keep &= probs.cumsum(-1) - probs < config.top_p
    if config.min_p > 0:
        keep &= (values - values[0]).exp() >= config.min_p
    keep[0] = True
    out = torch.full_like(scaled, float("-inf"))
    out[order[keep]] = values[keep]
    return out


def draw_outcomes(work: Sequence[Work], logits: Tensor, last_rows: Sequence[int]) -> list[Outcome]:
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
                # Copies of thousands of tokens in every step, for those alone who count them.
                counted = s.sampling.penalises
                prompt, completion = (s.prompt_token_ids, s.completion) if counted else ((), [])
                special.append((last, s.sampling, prompt, completion))
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
    sampled = sample(logits, rows)
    tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    outcomes = []
    for item, last in zip(work, last_rows, strict=True):
        its_rows = range(last + 1 - item.count, last + 1) if item.sequence.scores_prompt else ()
        scores = [sampled.scored[row] for row in its_rows if row in sampled.scored]
        if item.samples:
            kept = sampled.kept.get(last, ())
            outcomes.append(Outcome(tokens[last], logprobs[last], kept, scores))
        else:
            outcomes.append(Outcome(scored=scores))
    return outcomes
