"""A macro-batch made ready: every item checked, and what the losses count numbered and measured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ludic.errors import BatchError
from ludic.saw.batch import group_key, make_batch
from ludic.saw.items import BatchCounts, SAWBatch, SAWItem
from ludic.training.update.sharing import RowOrder


@dataclass(frozen=True, slots=True, eq=False)
class PackedItem:
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
    items = make_batch(batch.items).items
    if not items:
        raise BatchError(
            "the batch has no samples to train on (dropped by filters: "
            f"{batch.meta.get('dropped', {})}); loosen the filters or sample more"
        )
    _check_logprobs(items)
    turns: dict[Hashable, int] = {}
    rollouts: dict[Hashable, int] = {}
    groups: dict[Hashable, int] = {}
    packed = []
    for index, item in enumerate(items):
        keep = np.asarray(item.attention_mask, dtype=bool)
        actions = np.asarray(item.action_mask, dtype=bool)
        _check_item(item, index, keep, actions, max_seq_len)
        own = [(item.rollout_id, span.turn_index) for span in item.turns]
        weights = item.attachments.token_weights
        if weights is None:
            weights = np.full(int(actions.sum()), item.weight, dtype=np.float32)
        packed.append(
            PackedItem(
                np.asarray(item.input_ids, dtype=np.int64)[keep],
                np.flatnonzero(actions[keep]),
                np.asarray(weights, dtype=np.float32),
                np.repeat(
                    [turns.setdefault(turn, len(turns)) for turn in own],
                    [span.end - span.start for span in item.turns],
                ),
                rollouts.setdefault(item.rollout_id, len(rollouts)),
                groups.setdefault(group_key(item), len(groups)),
            )
        )
    counts = [p.actions.size for p in packed]
    return Layout(
        items,
        tuple(packed),
        RowOrder.of([p.input_ids for p in packed]),
        np.bincount(np.concatenate([p.turn_ids for p in packed])),
        np.bincount([p.rollout_id for p in packed], counts).astype(np.int64),
        np.bincount([p.group_id for p in packed], counts).astype(np.int64),
        batch.counts,
    )


def _check_item(
    item: SAWItem,
    index: int,
    keep: NDArray[np.bool_],
    actions: NDArray[np.bool_],
    max_seq_len: int | None,
) -> None:
    wrong, length = None, int(keep.sum())
    if max_seq_len is not None and length > max_seq_len:
        wrong = (
            f" has {length} tokens, over max_seq_len={max_seq_len}: raise the "
            "setting, or drop such samples with the filter drop_overlong()"
        )
    elif (actions & ~keep).any():
        wrong = ": an action token is hidden by the attention mask"
    elif actions[keep.argmax()]:
        wrong = ": its first token is an action, which nothing predicts"
    elif not item.temperature > 0:
        wrong = f": temperature {item.temperature} is not a distribution to train on"
    if wrong is not None:
        raise BatchError(describe(item, index) + wrong)


def _check_logprobs(items: Sequence[SAWItem]) -> None:
    """Log-probs are there for all samples of the batch or for none, and finite, however the batch
    is packed."""
    for name in ("behavior_logprobs", "reference_logprobs", "teacher_logprobs"):
        found = [getattr(item.attachments, name) for item in items]
        if all(values is None for values in found):
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
