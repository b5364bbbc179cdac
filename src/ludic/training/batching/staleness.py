"""How many versions the samples of a batch are behind the policy that is trained on them."""

from __future__ import annotations

from msgspec.structs import replace

from ludic.errors import BatchError
from ludic.saw.building import UNKNOWN_VERSION
from ludic.saw.items import SAWBatch, SAWItem

ANY_AGE = "ludic.any_age"
"""Set in the `meta` of an item to which the trainer's `max_lag` does not apply: its source bounds
the age itself (a replay buffer, the pipeline), or its versions are not this trainer's (stored
data)."""


def of_any_age(item: SAWItem) -> SAWItem:
    """The item, marked as one that the trainer takes whatever its age."""
    return replace(item, meta={**item.meta, ANY_AGE: True})


def batch_of_any_age(batch: SAWBatch) -> SAWBatch:
    """The batch with all its items so marked."""
    return replace(batch, items=tuple(map(of_any_age, batch.items)))


def lag_of(item: SAWItem, version: int) -> int:
    """How many versions the item's oldest token is behind `version`. A newer one, of a trainer that
    was lost, counts as not behind at all, and so does one whose version was not recorded."""
    versions = item.attachments.versions
    if versions is None:
        return 0
    recorded = versions[versions != UNKNOWN_VERSION]
    return max(version - int(recorded.min()), 0) if recorded.size else 0


def check_lag(batch: SAWBatch, version: int, max_lag: int | None) -> None:
    """Raises `BatchError` if a token is more than `max_lag` versions behind `version`."""
    if max_lag is None:
        return
    fresh = [item for item in batch.items if not item.meta.get(ANY_AGE)]
    oldest = max(fresh, key=lambda item: lag_of(item, version), default=None)
    if oldest is None or (lag := lag_of(oldest, version)) <= max_lag:
        return
    late = sum(lag_of(item, version) > max_lag for item in fresh)
    raise BatchError(
        f"rollout {oldest.rollout_id!r} has tokens of policy version {version - lag}, and version "
        f"{version} would be trained on them: {lag} versions old, over max_lag={max_lag} (so are "
        f"{late} of the batch's {len(batch.items)} samples). Let the source work less far ahead, "
        "give the trainer the publisher that tells the sampler of each version, or raise max_lag; "
        "TrainerConfig(max_lag=None) sets no bound"
    )
