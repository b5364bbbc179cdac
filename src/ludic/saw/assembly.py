"""From rollouts to a batch, in the same way for every batch source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ludic.saw.batch import make_batch
from ludic.saw.building import build_items
from ludic.saw.credit import CreditAssigner
from ludic.saw.filters import SampleFilter
from ludic.saw.grouping import LostMember, group_by_role, settle_groups
from ludic.saw.items import SAWBatch
from ludic.saw.statistics import item_statistics, rollout_statistics
from ludic.types import Rollout


class Algorithm(Protocol):
    """The part of an algorithm that making a batch needs: `RLAlgorithm`, or any object with
    credit."""

    @property
    def credit_assigner(self) -> CreditAssigner: ...


def batch_from_rollouts(
    rollouts: Sequence[Rollout],
    credit_assigner: CreditAssigner,
    *,
    sample_filter: SampleFilter | None = None,
    merge: bool = True,
    lost_member: LostMember = "drop_group",
    drops: Mapping[str, int] | None = None,
    meta: Mapping[str, Any] | None = None,
    sampled: Sequence[Rollout] | None = None,
) -> SAWBatch:
    """Settles groups, assigns credit, filters, merges and counts.

    Groups are per role: the credit assigner sees each `group_id` with the agent's role added.
    `drops` are earlier drops, by reason, to add; the batch's `meta["dropped"]` has all of them, in
    turns. `sampled` are the rollouts that the statistics are about, where they are others. The
    algorithm's preprocess is not applied here: the trainer applies it, once, to every batch.
    """
    dropped: Counter[str] = Counter(drops or {})
    kept = group_by_role(settle_groups(rollouts, lost_member, dropped))
    credit = credit_assigner.compute(kept) if kept else {}
    items = build_items(kept, credit, merge=merge, sample_filter=sample_filter, drops=dropped)
    return make_batch(
        items,
        {
            **rollout_statistics(rollouts if sampled is None else sampled),
            **item_statistics(items),
            "dropped": dict(dropped),
            **(meta or {}),
        },
    )
