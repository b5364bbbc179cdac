"""State, action, weight: rollouts and credit become the sequences that are trained on."""

from ludic.saw.assembly import Algorithm, batch_from_rollouts
from ludic.saw.batch import count_items, make_batch
from ludic.saw.building import UNKNOWN_VERSION, build_items
from ludic.saw.codec import batch_from_dict, batch_to_dict, item_from_dict, item_to_dict
from ludic.saw.credit import ComparesGroups, CreditAssigner, WatchesDrift
from ludic.saw.filters import (
    Sample,
    SampleFilter,
    combine,
    drop_if,
    drop_incomplete_completions,
    drop_overlong,
    drop_parse_errors,
    drop_truncated,
)
from ludic.saw.grouping import LostMember, group_by_role, settle_groups
from ludic.saw.items import BatchCounts, SampleAttachments, SAWBatch, SAWItem, TurnSpan
from ludic.saw.overlong import drop_overlong_episodes
from ludic.saw.statistics import item_statistics, rollout_statistics

__all__ = [
    "UNKNOWN_VERSION",
    "Algorithm",
    "BatchCounts",
    "ComparesGroups",
    "CreditAssigner",
    "LostMember",
    "SAWBatch",
    "SAWItem",
    "Sample",
    "SampleAttachments",
    "SampleFilter",
    "TurnSpan",
    "WatchesDrift",
    "batch_from_dict",
    "batch_from_rollouts",
    "batch_to_dict",
    "build_items",
    "combine",
    "count_items",
    "drop_if",
    "drop_incomplete_completions",
    "drop_overlong",
    "drop_overlong_episodes",
    "drop_parse_errors",
    "drop_truncated",
    "group_by_role",
    "item_from_dict",
    "item_statistics",
    "item_to_dict",
    "make_batch",
    "rollout_statistics",
    "settle_groups",
]
