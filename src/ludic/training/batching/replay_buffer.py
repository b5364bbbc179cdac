"""A replay buffer: trains on groups of earlier batches again, together with the newest."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import msgspec

from ludic.errors import BatchError, CheckpointError, ConfigError, LudicError, NotTrainableError
from ludic.saw.batch import make_batch
from ludic.saw.codec import item_from_dict, item_to_dict
from ludic.saw.items import UNKNOWN_VERSION, SAWBatch, SAWItem
from ludic.saw.statistics import item_statistics
from ludic.seeding import derive_seed
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.ahead import WrappedSource
from ludic.training.batching.source import GivesBatches, of_any_age


@dataclass(frozen=True)
class StoredGroup:
    """The items of one group (without groups, of one rollout), exactly as they were sampled and
    credited: weights, behaviour log-probs and versions are those of that time."""

    name: str
    items: tuple[SAWItem, ...]

    @cached_property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest policy among its tokens."""
        versions = [item.attachments.versions for item in self.items]
        recorded = [v for v in versions if v is not None and (v != UNKNOWN_VERSION).all()]
        if len(recorded) < len(versions):
            raise NotTrainableError(
                f"group {self.name!r} does not say which policy version sampled it, and a replay "
                "buffer bounds the age of samples by that: use a client that reports versions"
            )
        return min(int(v.min()) for v in recorded), max(int(v.max()) for v in recorded)

    @cached_property
    def packed(self) -> str:
        """The group as text, for a checkpoint's JSON."""
        plain = [self.name, [item_to_dict(item) for item in self.items]]
        return b64encode(zlib.compress(msgspec.msgpack.encode(plain), 1)).decode("ascii")

    @classmethod
    def unpacked(cls, text: str) -> StoredGroup:
        """Reads what `packed` wrote."""
        name, items = msgspec.msgpack.decode(zlib.decompress(b64decode(text)))
        return cls(name, tuple(map(item_from_dict, items)))


class ReplayBufferSource(WrappedSource):
    """Adds groups of earlier batches to every batch of `source`.

    A batch has all the new groups, and so many stored ones that they are `share` of it, or as many
    as there are. They are drawn without replacement: uniformly, or with a `half_life` with
    probabilities that halve for every so many versions of age. A stored group is whole and keeps
    its weights, behaviour log-probs and versions, so that ratios and corrections see how old it is.
    It stays until it is more than `max_age` versions old: the age of a group is how far its oldest
    token's policy is behind the newest in the buffer. `max_lag` does not apply to stored groups.

    The draw depends on the seed and the number of the batch only. The state has the stored groups,
    so that a resumed run replays what an uninterrupted one would.
    """

    def __init__(
        self,
        source: GivesBatches,
        *,
        share: float = 0.5,
        max_age: int = 4,
        half_life: float | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"ReplayBufferSource(share={share}): must be above 0 and below 1")
        if max_age < 1:
            raise ConfigError(f"ReplayBufferSource(max_age={max_age}): must be >= 1")
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"ReplayBufferSource(half_life={half_life}): must be above 0")
        super().__init__(source)
        self.share, self.max_age, self.half_life, self.seed = share, max_age, half_life, seed
        self.step = 0
        self._stored: tuple[StoredGroup, ...] = ()
        self._needs_behavior = _compares_with_sampler(self.algorithm)

    async def next_batch(self) -> SAWBatch:
        """The next batch of the wrapped source and the stored groups that are drawn for it."""
        batch = await self.source.next_batch()
        if not batch.items:
            return batch
        new = _grouped(batch.items)
        self._check(new)
        newest = max(g.versions[1] for g in (*new, *self._stored))
        young = [g for g in self._stored if newest - g.versions[0] <= self.max_age]
        wanted = round(len(new) * self.share / (1 - self.share))
        drawn = self._drawn(young, wanted, newest)
        self._stored = (*young, *new)
        self.step += 1
        items = [*batch.items, *(of_any_age(item) for group in drawn for item in group.items)]
        meta = {
            **batch.meta,
            **item_statistics(items),
            "replay_share": len(drawn) / (len(new) + len(drawn)),
            "replay_stored": len(self._stored),
        }
        if drawn:
            ages = [newest - group.versions[0] for group in drawn]
            meta |= {"replay_age_mean": sum(ages) / len(ages), "replay_age_max": max(ages)}
        return make_batch(items, meta)

    def _drawn(self, groups: Sequence[StoredGroup], wanted: int, newest: int) -> list[StoredGroup]:
        """Those that come first if each waits an exponential time at a rate equal to its weight,
        which is a weighted draw without replacement; returned in the order of storing."""
        rng = Random(derive_seed(self.seed, "replay buffer", self.step))
        waits: list[float] = []
        for group in groups:
            halvings = (newest - group.versions[0]) / self.half_life if self.half_life else 0.0
            waits.append(rng.expovariate(1.0) * 2.0 ** min(halvings, 1000.0))
        first = sorted(range(len(groups)), key=waits.__getitem__)[:wanted]
        return [groups[place] for place in sorted(first)]

    def _check(self, new: Sequence[StoredGroup]) -> None:
        stored = {group.name for group in self._stored}
        for group in new:
            if group.name in stored:
                raise BatchError(
                    f"group {group.name!r} is in the replay buffer already: every group, and every "
                    "rollout without one, needs its own id for the whole run"
                )
            without = [i for i in group.items if i.attachments.behavior_logprobs is None]
            if without and self._needs_behavior:
                raise NotTrainableError(
                    f"rollout {without[0].rollout_id!r} has no behaviour log-probs, so nothing "
                    "could correct for its age when it is replayed: sample with "
                    "ReturnSpec(logprobs=True), or leave the replay buffer out"
                )

    def state_dict(self) -> Mapping[str, Any]:
        """The stored groups, the number of the next batch, and the state of the wrapped source."""
        return {
            "step": self.step,
            "stored": [group.packed for group in self._stored],
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken."""
        try:
            step, _ = int(state["step"]), state["source"]
            stored = tuple(map(StoredGroup.unpacked, state["stored"]))
        except (KeyError, TypeError, ValueError, zlib.error, LudicError) as exc:
            raise CheckpointError(f"not the state of a ReplayBufferSource: {exc!r}") from exc
        super().load_state_dict(state)
        self.step, self._stored = step, stored


def _grouped(items: Sequence[SAWItem]) -> list[StoredGroup]:
    groups: dict[tuple[bool, str], list[SAWItem]] = {}
    for item in items:
        alone = item.group_id is None
        name = item.rollout_id if item.group_id is None else item.group_id
        groups.setdefault((alone, name), []).append(item)
    return [StoredGroup(name, tuple(members)) for (_, name), members in groups.items()]


def _compares_with_sampler(algorithm: RLAlgorithm | None) -> bool:
    """Whether the log-probs of the policy that sampled are needed: a supervised loss alone does
    without them."""
    if algorithm is None:
        return True
    from ludic.training.algorithms.sft import MaskedCausalLMCrossEntropyLoss

    return not isinstance(algorithm.loss, MaskedCausalLMCrossEntropyLoss)
