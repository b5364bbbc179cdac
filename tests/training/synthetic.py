"""Made-up batches for tests of the trainer: a function of a seed and the batch's number."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from msgspec.structs import replace

from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Weights
from ludic.saw.batch import make_batch
from ludic.saw.items import SampleAttachments, SAWBatch, SAWItem, TurnSpan
from ludic.seeding import derive_seed
from ludic.training.algorithm import RLAlgorithm
from ludic.training.algorithms.reinforce import make_reinforce
from ludic.training.batching.source import BatchSource, PolicyLostError

VOCAB = 250


def synthetic_item(rng: np.random.Generator, rollout: str, group: str, turns: int) -> SAWItem:
    """A merged item of `turns` turns: random prompts, actions, weights and behaviour."""
    ids: list[int] = []
    mask: list[int] = []
    spans: list[TurnSpan] = []
    weights: list[float] = []
    for turn in range(turns):
        prompt, action = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        ids += rng.integers(0, VOCAB, prompt + action).tolist()
        mask += [0] * prompt + [1] * action
        weight = float(np.float32(rng.normal()))
        spans.append(TurnSpan(len(weights), len(weights) + action, turn, weight))
        weights += [weight] * action
    count = len(weights)
    return SAWItem(
        input_ids=np.array(ids, dtype=np.int64),
        attention_mask=np.ones(len(ids), dtype=np.int8),
        action_mask=np.array(mask, dtype=np.int8),
        weight=float("nan"),
        attachments=SampleAttachments(
            behavior_logprobs=rng.normal(-5.5, 0.1, count).astype(np.float32),
            token_weights=np.array(weights, dtype=np.float32),
            versions=np.zeros(count, dtype=np.int64),
        ),
        turns=tuple(spans),
        rollout_id=rollout,
        group_id=group,
        temperature=float(rng.choice([0.7, 1.0])),
    )


def with_prompt(item: SAWItem, length: int) -> SAWItem:
    """The item behind tokens that depend on its group alone."""
    ids = np.random.default_rng(derive_seed(0, str(item.group_id))).integers(0, VOCAB, length)
    return replace(
        item,
        input_ids=np.concatenate([ids, item.input_ids]),
        attention_mask=np.concatenate([np.ones(length, np.int8), item.attention_mask]),
        action_mask=np.concatenate([np.zeros(length, np.int8), item.action_mask]),
    )


def synthetic_batch(seed: int, rollouts: int = 6, prompt: int = 0) -> SAWBatch:
    """Groups of two, with as many more tokens in front that the members of a group share."""
    rng = np.random.default_rng(seed)
    items = [
        synthetic_item(rng, f"{seed}-r{i}", f"{seed}-g{i // 2}", int(rng.integers(1, 4)))
        for i in range(rollouts)
    ]
    if prompt:
        items = [with_prompt(item, prompt) for item in items]
    return make_batch(items, {"train/reward": float(rng.normal())})


def of_version(batch: SAWBatch, version: int) -> SAWBatch:
    """The batch as if a policy of that version, or the first, had sampled it."""
    items = []
    for item in batch.items:
        versions = np.full(int(item.action_mask.sum()), max(version, 0), dtype=np.int64)
        items.append(replace(item, attachments=replace(item.attachments, versions=versions)))
    return replace(batch, items=tuple(items))


class SyntheticSource(BatchSource):
    """Gives batch after batch, and remembers how many. Each has the version of a policy that had
    all updates but the last `lag`."""

    def __init__(self, seed: int = 0, rollouts: int = 6, prompt: int = 0, lag: int = 0) -> None:
        self.seed, self.rollouts, self.prompt, self.count = seed, rollouts, prompt, 0
        self.lag = lag
        self.loses_after: list[int] = []  # so many batches, the samplers have no policy any more

    async def next_batch(self) -> SAWBatch:
        if self.count in self.loses_after:
            self.loses_after.remove(self.count)
            raise PolicyLostError("all samplers were started again")
        self.count += 1
        seed = derive_seed(self.seed, self.count) % 2**31
        return of_version(
            synthetic_batch(seed, self.rollouts, self.prompt), self.count - 1 - self.lag
        )

    def state_dict(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])


class RecordingPublisher(PolicyPublisher):
    """Remembers what was published."""

    shares_weights = False

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.weights: list[dict[str, Any]] = []
        self.updates = 0

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        self.updates += 1
        yield

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        self.weights.append({name: tensor.clone() for name, tensor in pairs})
        self.versions.append(version)
        return PublishReport(version, 0.0)


def reinforce() -> RLAlgorithm:
    return make_reinforce()
