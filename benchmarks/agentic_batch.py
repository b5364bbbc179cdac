"""The ragged batch of the update benchmark: episodes of several turns, in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ludic.saw.batch import make_batch
from ludic.saw.items import SampleAttachments, SAWBatch, SAWItem, TurnSpan


@dataclass(frozen=True)
class Shape:
    """What an episode looks like. Every turn adds a prompt and a completion of such lengths; a
    group's episodes share their first prompt."""

    episodes: int = 64
    group_size: int = 8
    turns: tuple[int, int] = (4, 8)
    prompt: tuple[int, int] = (200, 1500)
    completion: tuple[int, int] = (20, 200)
    vocab: int = 151_936


def episodes(shape: Shape, seed: int = 0) -> list[SAWItem]:
    """One merged item per episode, every turn of an episode with the episode's advantage."""
    rng = np.random.default_rng(seed)
    items, first = [], np.zeros(0, dtype=np.int64)
    for episode in range(shape.episodes):
        if episode % shape.group_size == 0:
            first = _ids(rng, shape.prompt, shape.vocab)
        parts, mask, spans = [], [], []
        weight, actions = float(np.float32(rng.normal())), 0
        for turn in range(int(rng.integers(shape.turns[0], shape.turns[1] + 1))):
            prompt = first if turn == 0 else _ids(rng, shape.prompt, shape.vocab)
            completion = _ids(rng, shape.completion, shape.vocab)
            parts += [prompt, completion]
            mask += [np.zeros(prompt.size, np.int8), np.ones(completion.size, np.int8)]
            spans.append(TurnSpan(actions, actions + completion.size, turn, weight))
            actions += completion.size
        ids = np.concatenate(parts)
        items.append(
            SAWItem(
                input_ids=ids,
                attention_mask=np.ones(ids.size, np.int8),
                action_mask=np.concatenate(mask),
                weight=float("nan"),
                turns=tuple(spans),
                attachments=SampleAttachments(
                    token_weights=np.full(actions, weight, np.float32),
                    behavior_logprobs=np.full(actions, -np.log(shape.vocab), np.float32),
                ),
                rollout_id=f"episode-{episode}",
                group_id=f"group-{episode // shape.group_size}",
            )
        )
    return items


def _ids(rng: np.random.Generator, bounds: tuple[int, int], vocab: int) -> NDArray[np.int64]:
    return rng.integers(0, vocab, int(rng.integers(bounds[0], bounds[1] + 1)))


def with_behavior(
    items: Sequence[SAWItem], scores: Sequence[NDArray[np.float32]], seed: int = 0
) -> list[SAWItem]:
    """The items as a sampler a little off the trainer would have reported them."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            item,
            attachments=replace(
                item.attachments,
                behavior_logprobs=(s + rng.normal(0, 0.05, s.size)).astype(np.float32),
            ),
        )
        for item, s in zip(items, scores, strict=True)
    ]


def one_row_per_turn(items: Sequence[SAWItem]) -> SAWBatch:
    """The same samples without merging: each turn is a row that repeats all that came before."""
    rows = []
    for item in items:
        places = np.flatnonzero(item.action_mask)
        logps = item.attachments.behavior_logprobs
        assert logps is not None
        for span in item.turns:
            end = int(places[span.end - 1]) + 1
            mask = np.zeros(end, np.int8)
            mask[places[span.start : span.end]] = 1
            rows.append(
                replace(
                    item,
                    input_ids=item.input_ids[:end],
                    attention_mask=np.ones(end, np.int8),
                    action_mask=mask,
                    weight=span.weight,
                    turns=(replace(span, start=0, end=span.end - span.start),),
                    attachments=SampleAttachments(
                        token_weights=np.full(span.end - span.start, span.weight, np.float32),
                        behavior_logprobs=logps[span.start : span.end],
                    ),
                )
            )
    return make_batch(rows)


def dense(sequences: int, length: int, vocab: int, actions: float = 0.25) -> SAWBatch:
    """Sequences of one length, whose last part is one completion."""
    rng, count = np.random.default_rng(1), int(length * actions)
    items = []
    for i in range(sequences):
        ids, weight = rng.integers(0, vocab, length), float(np.float32(rng.normal()))
        items.append(one_completion(ids, count, weight, vocab, rollout_id=f"dense-{i}"))
    return make_batch(items)


def one_completion(
    ids: NDArray[np.int64], actions: int, weight: float, vocab: int, **names: Any
) -> SAWItem:
    """A row whose last tokens are a completion, of a sampler that preferred no token to another."""
    mask = np.zeros(ids.size, np.int8)
    mask[-actions:] = 1
    logps = np.full(actions, -np.log(vocab), np.float32)
    attached = SampleAttachments(behavior_logprobs=logps)
    return SAWItem(ids, np.ones_like(mask), mask, weight, attachments=attached, **names)
