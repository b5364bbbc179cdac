"""A macro-batch made ready: every item checked, and what the losses count numbered and measured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.errors import BatchError
from ludic.plumbing.records import Record
from ludic.saw.batch import completed, group_key
from ludic.saw.items import BatchCounts, SAWBatch, SAWItem
from ludic.saw.ragged import bounds
from ludic.training.update.sharing import RowOrder


class PackedItem(Record, frozen=True, eq=False):
    """An item made ready: unmasked tokens only, and its action tokens' turns in batch numbers."""

    input_ids: NDArray[np.int64]
    actions: NDArray[np.int64]
    weights: NDArray[np.float32]
    turn_ids: NDArray[np.int64]
    rollout_id: int
    group_id: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A macro-batch with its turns, rollouts and groups numbered and measured."""

    items: tuple[SAWItem, ...]
    packed: tuple[PackedItem, ...]
    order: RowOrder
    turn_lengths: NDArray[np.int64]
    rollout_lengths: NDArray[np.int64]
    group_lengths: NDArray[np.int64]
    counts: BatchCounts


def describe(item: SAWItem, index: int) -> str:
    """How errors name a sample."""
    turns = [span.turn_index for span in item.turns]
    return f"sample {index} (rollout {item.rollout_id!r}, turns {turns})"


def lay_out(batch: SAWBatch, *, max_seq_len: int | None = None) -> Layout:
    """Checks every item of the macro-batch and numbers what the losses count.

    Raises `BatchError` for a sample that cannot be trained on, and for a batch without
    samples. A sample longer than `max_seq_len` is an error, never cut.
    """
    items = completed(batch.items)
    if not items:
        raise BatchError(
            "the batch has no samples to train on (dropped by filters: "
            f"{batch.meta.get('dropped', {})}); loosen the filters or sample more"
        )
    _check_logprobs(items)
    turns: dict[Hashable, int] = {}
    rollouts: dict[Hashable, int] = {}
    groups: dict[Hashable, int] = {}
    # Of all items at once: an array of few tokens costs much more to make than to fill.
    counts = [item.turns[-1].end for item in items]
    turn_ids = np.repeat(
        [
            turns.setdefault((item.rollout_id, span.turn_index), len(turns))
            for item in items
            for span in item.turns
        ],
        [span.end - span.start for item in items for span in item.turns],
    )
    weights = np.repeat(np.array([item.weight for item in items], dtype=np.float32), counts)
    packed = []
    rows = _rows(items, max_seq_len)
    for item, (ids, actions), (start, end) in zip(
        items, rows, pairwise(bounds(counts)), strict=True
    ):
        own = item.attachments.token_weights
        packed.append(
            PackedItem(
                ids,
                actions,
                weights[start:end] if own is None else np.asarray(own, dtype=np.float32),
                turn_ids[start:end],
                rollouts.setdefault(item.rollout_id, len(rollouts)),
                groups.setdefault(group_key(item), len(groups)),
            )
        )
    return Layout(
        items,
        tuple(packed),
        RowOrder.of([p.input_ids for p in packed]),
        np.bincount(turn_ids),
        np.bincount([p.rollout_id for p in packed], counts).astype(np.int64),
        np.bincount([p.group_id for p in packed], counts).astype(np.int64),
        batch.counts,
    )


def _rows(
    items: Sequence[SAWItem], max_seq_len: int | None
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The tokens of each item that the attention mask shows, and where its actions are."""
    lengths = [len(item.input_ids) for item in items]
    if (
        (max_seq_len is not None and max(lengths) > max_seq_len)
        or not np.concatenate([item.attention_mask for item in items]).all()
        or not all(item.temperature > 0 for item in items)
    ):  # tokens to leave out, or something wrong
        found = (_visible(item, index, max_seq_len) for index, item in enumerate(items))
        return [(ids, actions.nonzero()[0]) for ids, actions in found]
    ids = np.concatenate([item.input_ids for item in items], dtype=np.int64, casting="unsafe")
    counts, starts = [item.turns[-1].end for item in items], bounds(lengths)
    actions = np.concatenate([item.action_mask for item in items]).nonzero()[0]
    actions -= np.repeat(starts[:-1], counts)
    return [
        (ids[a:b], actions[c:d])
        for (a, b), (c, d) in zip(pairwise(starts), pairwise(bounds(counts)), strict=True)
    ]


def _visible(
    item: SAWItem, index: int, max_seq_len: int | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The item's tokens that the attention mask shows, and which of them are actions."""
    ids = np.asarray(item.input_ids, dtype=np.int64)
    actions = np.asarray(item.action_mask, dtype=bool)
    keep = np.asarray(item.attention_mask, dtype=bool)
    hidden = False
    if not keep.all():
        hidden = bool(actions[~keep].any())
        ids, actions = ids[keep], actions[keep]
    wrong = None
    if max_seq_len is not None and ids.size > max_seq_len:
        wrong = (
            f" has {ids.size} tokens, over max_seq_len={max_seq_len}: raise the "
            "setting, or drop such samples with the filter drop_overlong()"
        )
    elif hidden:
        wrong = ": an action token is hidden by the attention mask"
    elif actions[0]:
        wrong = ": its first token is an action, which nothing predicts"
    elif not item.temperature > 0:
        wrong = f": temperature {item.temperature} is not a distribution to train on"
    if wrong is not None:
        raise BatchError(describe(item, index) + wrong)
    return ids, actions


ROUNDING = 1e-2
"""How far above 0 a log-prob may come out that a server computed in bfloat16."""


def _check_logprobs(items: Sequence[SAWItem]) -> None:
    """Log-probs are there for all samples of the batch or for none, and finite, however the batch
    is packed."""
    for name in ("behavior_logprobs", "reference_logprobs", "teacher_logprobs"):
        found = [getattr(item.attachments, name) for item in items]
        known = [values for values in found if values is not None]
        if not known or (len(known) == len(found) and _are_logprobs(np.concatenate(known))):
            continue
        for index, (item, values) in enumerate(zip(items, found, strict=True)):
            if values is None:
                raise BatchError(
                    f"{describe(item, index)} has no {name}, while others of its batch do: "
                    "record them for all samples, or for none"
                )
            if not np.isfinite(values).all():
                at = int(np.argmin(np.isfinite(values)))
                raise BatchError(
                    f"{describe(item, index)}: {name} of action token {at} is {values[at]}, which "
                    "cannot be trained on: look at what reported it, or drop the sample"
                )
            if not _are_logprobs(values):
                at = int(np.argmax(values))
                raise BatchError(
                    f"{describe(item, index)}: {name} of action token {at} is {values[at]}, above "
                    "0, so it is no log-probability: look at what reported it (a logit, or a "
                    "negated log-prob?), or drop the sample"
                )


def _are_logprobs(values: NDArray[np.floating[Any]]) -> bool:
    """Whether all are finite, and above 0 by no more than rounding."""
    return bool((np.isfinite(values) & (values <= ROUNDING)).all())
