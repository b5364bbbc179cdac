"""What a sample that is too long to train on costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np

from ludic.saw.batch import group_key, make_batch
from ludic.saw.items import SAWBatch, SAWItem
from ludic.saw.statistics import item_statistics

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
