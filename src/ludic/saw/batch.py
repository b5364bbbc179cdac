"""From items to a macro-batch: checks, the counts that losses normalise by, and what a sample
that is too long to train on costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec.structs import fields, replace
from numpy.typing import ArrayLike, NDArray

from ludic.errors import BatchError, CreditError
from ludic.saw.items import BatchCounts, SampleAttachments, SAWBatch, SAWItem, TurnSpan
from ludic.saw.statistics import item_statistics


def ranges(starts: ArrayLike, lengths: ArrayLike) -> NDArray[np.int64]:
    """The numbers of all the ranges, each with its start and length, end to end.

    >>> ranges([0, 10], [3, 2]).tolist()
    [0, 1, 2, 10, 11]
    """
    sizes = np.asarray(lengths, np.int64)
    shifts = np.asarray(starts, np.int64) - sizes.cumsum() + sizes
    numbers: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(shifts, sizes)
    return numbers


def bounds(lengths: Sequence[int]) -> list[int]:
    """Where arrays of these lengths begin and, one further on, end.

    >>> bounds([3, 2])
    [0, 3, 5]
    """
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]


def make_batch(items: Iterable[SAWItem], meta: Mapping[str, Any] | None = None) -> SAWBatch:
    """Checks every item and counts the tokens, turns, rollouts and groups of the batch.

    A hand-made item may leave `turns` and `rollout_id` empty: it is then one turn of a separate
    rollout. Raises `BatchError` for masks or attachments of the wrong length and `CreditError` for
    weights that are not finite.
    """
    checked = completed(items)
    return SAWBatch(checked, count_items(checked), dict(meta or {}))


def completed(items: Iterable[SAWItem]) -> tuple[SAWItem, ...]:
    """The items of a batch, checked and completed as `make_batch` says."""
    given = tuple(items)
    if _all_sound(given):
        return given
    return tuple([_completed(item, index) for index, item in enumerate(given)])


def count_items(items: Iterable[SAWItem]) -> BatchCounts:
    """The counts of a macro-batch's items, as `make_batch` completes them. A turn that forked into
    several items counts once, and a rollout without a group counts as a group."""
    tokens = 0
    turns: set[tuple[str, int]] = set()
    rollouts: dict[str, SAWItem] = {}
    groups: set[Hashable] = set()
    for item in items:
        tokens += item.turns[-1].end
        turns.update([(item.rollout_id, span.turn_index) for span in item.turns])
        first = rollouts.setdefault(item.rollout_id, item)
        if first.meta is not item.meta:
            one, other = _played(first), _played(item)
            if one | other != other | one:
                raise BatchError(
                    f"two rollouts are both called {item.rollout_id!r}: {one} and {other}. Are "
                    "they of two sources? Give the items of one of them other names "
                    "(`rollout_id`, `group_id`)"
                )
        groups.add(group_key(item))
    return BatchCounts(tokens, len(turns), len(rollouts), len(groups))


def _played(item: SAWItem) -> dict[str, Any]:
    """What is the same in all the items of a rollout, where they say it."""
    return {n: item.meta[n] for n in ("env", "task_key", "total_reward") if n in item.meta}


def group_key(item: SAWItem) -> Hashable:
    """What the item's group is told from others by; a rollout without a group is one itself."""
    return item.group_id if item.group_id is not None else ("rollout", item.rollout_id)


def _all_sound(items: Sequence[SAWItem]) -> bool:
    """Whether every item is complete and passes the checks that `_completed` makes: of all at once,
    since each looks at few numbers."""
    lengths = [len(item.input_ids) for item in items]
    if (
        not items
        or not all(lengths)
        or lengths != [len(item.attention_mask) for item in items]
        or lengths != [len(item.action_mask) for item in items]
        or not all([item.rollout_id and item.turns for item in items])  # noqa: C419
    ):
        return False
    starts = np.cumsum([0, *lengths[:-1]])
    actions = np.concatenate([item.action_mask for item in items]) != 0
    counts = np.add.reduceat(actions, starts, dtype=np.int64).tolist()
    if not all(counts) or actions[starts].any():
        return False
    for column in zip(*[_attached(item.attachments) for item in items], strict=True):
        for values, count in zip(column, counts, strict=True):
            if values is not None and len(values) != count:
                return False
    for item, count in zip(items, counts, strict=True):
        at = 0
        for span in item.turns:
            if span.start != at or span.end <= at:
                return False
            at = span.end
        if at != count:
            return False
    found = [(item.attachments.token_weights, item.weight) for item in items]
    tokens = [weights for weights, _ in found if weights is not None]
    return all(math.isfinite(weight) for weights, weight in found if weights is None) and (
        not tokens or bool(np.isfinite(np.concatenate(tokens)).all())
    )


def _completed(item: SAWItem, index: int) -> SAWItem:
    try:
        actions = _check_masks(item)
        _check_attachments(item.attachments, actions)
        _check_weights(item)
        if item.turns:
            _check_turns(item, actions)
            return item if item.rollout_id else replace(item, rollout_id=f"item-{index}")
        if math.isnan(item.weight):
            raise BatchError("weight is NaN (a merged item), but `turns` is empty")
    except (BatchError, CreditError) as exc:
        where = f"item {index}" + (f" (rollout {item.rollout_id!r})" if item.rollout_id else "")
        raise type(exc)(f"{where}: {exc}") from None
    return replace(
        item,
        turns=(TurnSpan(0, actions, 0, item.weight),),
        rollout_id=item.rollout_id or f"item-{index}",
    )


def _check_masks(item: SAWItem) -> int:
    """Checks ids and masks against each other; returns the number of action tokens."""
    length = len(item.input_ids)
    masks = (("attention_mask", item.attention_mask), ("action_mask", item.action_mask))
    for name, mask in masks:
        if len(mask) != length:
            raise BatchError(f"{name} has {len(mask)} entries for {length} input_ids")
    actions = int(np.count_nonzero(item.action_mask))
    if actions == 0:
        raise BatchError("no token is an action; leave the item out")
    if item.action_mask[0]:
        raise BatchError(
            "the first token is an action, and nothing before it predicts "
            "it; begin the state with at least one token"
        )
    return actions


_ATTACHED = tuple(field.name for field in fields(SampleAttachments))
_attached = attrgetter(*_ATTACHED)


def _check_attachments(attachments: SampleAttachments, actions: int) -> None:
    for name, value in zip(_ATTACHED, _attached(attachments), strict=True):
        if value is not None and len(value) != actions:
            raise BatchError(
                f"attachments.{name} has {len(value)} entries for {actions} action tokens"
            )


def _check_weights(item: SAWItem) -> None:
    weights = item.attachments.token_weights
    if weights is not None:
        if not np.isfinite(weights).all():
            at = int(np.argmin(np.isfinite(weights)))
            raise CreditError(f"the weight of action token {at} is {weights[at]}")
    elif not math.isfinite(item.weight):
        raise CreditError(
            f"the weight is {item.weight}; a merged item needs attachments.token_weights"
            if math.isnan(item.weight)
            else f"the weight is {item.weight}"
        )


def _check_turns(item: SAWItem, actions: int) -> None:
    at = 0
    for span in item.turns:
        if span.start != at or span.end <= span.start:
            raise BatchError(
                f"turn {span.turn_index} covers {span.start} to {span.end}; "
                f"turns must follow each other without gaps, and {at} comes next"
            )
        at = span.end
    if at != actions:
        raise BatchError(f"the turns cover {at} of {actions} action tokens")


LOST_MEMBER = "lost_member"
"""The key in the `meta` of a batch of episodes that were just played: what becomes of a group that
loses one (`LostMember`). Batches of data that a user gave do not have it."""


def drop_overlong_episodes(batch: SAWBatch, max_seq_len: int) -> SAWBatch:
    """The batch without the episodes that have a sample of more than `max_seq_len` tokens.

    Such an episode is lost as a failed one is: the batch's `meta` says what becomes of its group.
    Its turns are counted as "overlong", those of its group as "group_lost_member", and episodes in
    `meta["overlong_episodes"]`. A batch whose `meta` says nothing is left as it is, and the trainer
    refuses it.
    """
    policy = batch.meta.get(LOST_MEMBER)
    if policy is None:
        return batch
    long = [item for item in batch.items if np.count_nonzero(item.attention_mask) > max_seq_len]
    if not long:
        return _counted(batch, 0)
    lost = {_episode(item) for item in long}
    members = [item for item in batch.items if _episode(item) in lost]
    groups = {_group(item) for item in members} if policy == "drop_group" else set()
    drops: Counter[str] = Counter(batch.meta.get("dropped", {}))
    kept: list[SAWItem] = []
    seen: set[tuple[str, int]] = set()
    for item in batch.items:
        if _episode(item) in lost:
            reason = "overlong"
        elif _group(item) in groups:
            reason = "group_lost_member"
        else:
            kept.append(item)
            continue
        for span in item.turns:  # a turn that forked is in several items, and counts once
            turn = (item.rollout_id, span.turn_index)
            drops[reason] += turn not in seen
            seen.add(turn)
    meta = {**batch.meta, **item_statistics(kept), "dropped": dict(drops)}
    return _counted(make_batch(kept, meta), len(lost))


def longest(batch: SAWBatch) -> int:
    """The tokens of the longest sample."""
    return max((int(np.count_nonzero(item.attention_mask)) for item in batch.items), default=0)


def _counted(batch: SAWBatch, episodes: int) -> SAWBatch:
    return SAWBatch(batch.items, batch.counts, {**batch.meta, "overlong_episodes": episodes})


def _episode(item: SAWItem) -> str:
    return str(item.meta.get("episode_id") or item.rollout_id)


def _group(item: SAWItem) -> Hashable:
    """The group of all roles of an episode; credit narrowed it to the agent's."""
    key = group_key(item)
    return key.removesuffix(f"/{item.meta.get('agent_id')}") if isinstance(key, str) else key
