"""The whole way from rollouts to a batch, as every batch source goes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ludic.saw.batch import make_batch
from ludic.saw.building import build_items
from ludic.saw.filters import SampleFilter
from ludic.saw.grouping import LostMember, group_by_role, settle_groups
from ludic.saw.items import SAWBatch
from ludic.saw.statistics import item_statistics, rollout_statistics
from ludic.types import Rollout, RolloutStepKey


class AssignsCredit(Protocol):
    """The one thing that a batch needs from an algorithm's credit assigner."""

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float]: ...


class Algorithm(Protocol):
    """What making a batch needs of an algorithm; `RLAlgorithm` has it. It may also have a
    `preprocess` of batches, or a `prepare` that includes it."""

    @property
    def credit_assigner(self) -> AssignsCredit: ...


def prepare_batch(batch: SAWBatch, algorithm: Algorithm) -> SAWBatch:
    """Applies the algorithm's `prepare` (or plain `preprocess`) once: `meta["prepared"]` says that
    it was done, and a second call changes nothing. Scorers go before it."""
    if batch.meta.get("prepared") or not batch.items:
        return batch
    step = getattr(algorithm, "prepare", None) or getattr(algorithm, "preprocess", None)
    prepared: SAWBatch = batch if step is None else step(batch)
    name = getattr(algorithm, "name", type(algorithm).__name__)
    return replace(prepared, meta={**prepared.meta, "prepared": name})


def batch_from_rollouts(
    rollouts: Sequence[Rollout],
    credit_assigner: AssignsCredit,
    *,
    sample_filter: SampleFilter | None = None,
    merge: bool = True,
    lost_member: LostMember = "drop_group",
    drops: Mapping[str, int] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> SAWBatch:
    """Settles groups, assigns credit, filters, merges and counts.

    Groups are per role: the credit assigner sees each `group_id` with the agent's role added.
    `drops` are earlier drops, by reason, to be counted in; the batch's `meta["dropped"]` has all
    of them, in turns. What an algorithm does to whole batches comes after: see `prepare_batch`.
    """
    dropped: Counter[str] = Counter(drops or {})
    kept = group_by_role(settle_groups(rollouts, lost_member, dropped))
    credit = credit_assigner.compute(kept) if kept else {}
    items = build_items(kept, credit, merge=merge, sample_filter=sample_filter, drops=dropped)
    return make_batch(
        items,
        {
            **rollout_statistics(rollouts),
            **item_statistics(items),
            "dropped": dict(dropped),
            **(meta or {}),
        },
    )
