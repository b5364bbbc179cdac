"""The replay buffer: what it mixes, what it keeps intact, what it refuses, and how it resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ludic.errors import BatchError, CheckpointError, ConfigError, NotTrainableError
from ludic.inference.tiny import tiny_model
from ludic.saw.batch import make_batch
from ludic.saw.codec import item_to_dict
from ludic.saw.items import SAWBatch, SAWItem
from ludic.training import (
    CheckpointConfig,
    CorrectedLoss,
    ReplayBufferSource,
    RLAlgorithm,
    SamplingAhead,
    Trainer,
    TrainerConfig,
    TruncatedImportance,
    make_grpo,
    make_sft,
)
from ludic.training.batching.replay_buffer import StoredGroup
from ludic.training.batching.source import ANY_AGE
from tests.training.synthetic import SyntheticSource, reinforce, synthetic_batch


def of_version(item: SAWItem, version: int) -> SAWItem:
    tokens = int(np.count_nonzero(item.action_mask))
    versions = np.full(tokens, version, dtype=np.int64)
    return structs.replace(item, attachments=structs.replace(item.attachments, versions=versions))


class Versioned(SyntheticSource):
    """Batch n, from 0, was sampled by policy version n."""

    algorithm: RLAlgorithm | None = None

    async def next_batch(self) -> SAWBatch:
        batch = await super().next_batch()
        return make_batch([of_version(i, self.count - 1) for i in batch.items], batch.meta)


def groups(batch: SAWBatch) -> list[str]:
    return list(dict.fromkeys(str(item.group_id) for item in batch.items))


def plain(items: Any) -> list[Mapping[str, Any]]:
    return [item_to_dict(item) for item in items]


async def batches(source: ReplayBufferSource, count: int) -> list[SAWBatch]:
    return [await source.next_batch() for _ in range(count)]


async def test_old_groups_come_to_the_new_ones_by_the_stated_share() -> None:
    fresh = [await s.next_batch() for s in [Versioned()] for _ in range(5)]
    mixed = await batches(ReplayBufferSource(Versioned(), share=0.6, max_age=9), 5)
    # Three new groups need 4.5, so four, old ones for a share of 0.6; the first batches have less.
    assert [len(groups(b)) for b in mixed] == [3, 6, 7, 7, 7]
    assert [b.meta["replay_share"] for b in mixed] == [0.0, 0.5, 4 / 7, 4 / 7, 4 / 7]
    assert [b.meta["replay_stored"] for b in mixed] == [3, 6, 9, 12, 15]
    for number, (new, batch) in enumerate(zip(fresh, mixed, strict=True)):
        assert plain(batch.items[: len(new.items)]) == plain(new.items)
        assert batch.meta["train/reward"] == new.meta["train/reward"]  # of the new rollouts alone
        known = {name for earlier in fresh[:number] for name in groups(earlier)}
        old = groups(batch)[3:]
        assert len(set(old)) == len(old)
        assert set(old) <= known


async def test_a_stored_group_is_whole_and_as_it_was_sampled() -> None:
    mixed = await batches(ReplayBufferSource(Versioned(), max_age=9), 6)
    first: dict[str, list[Mapping[str, Any]]] = {}
    replayed = 0
    for batch in mixed:
        for name in groups(batch):
            members = [i for i in batch.items if i.group_id == name]
            assert {i.meta.get(ANY_AGE, False) for i in members} == {name in first}
            found = plain(structs.replace(i, meta={}) for i in members)
            replayed += name in first
            assert first.setdefault(name, found) == found
    assert replayed == 15


async def test_no_group_is_older_than_the_bound_and_the_ages_are_counted() -> None:
    mixed = await batches(ReplayBufferSource(Versioned(), share=0.8, max_age=2), 8)
    for number, batch in enumerate(mixed):
        ages = {
            str(i.group_id): number - int(i.attachments.versions.min())  # type: ignore[union-attr]
            for i in batch.items
        }
        old = [age for age in ages.values() if age]
        assert max(old, default=0) <= 2
        if number:
            assert batch.meta["replay_age_max"] == max(old)
            assert batch.meta["replay_age_mean"] == pytest.approx(sum(old) / len(old))
        assert batch.meta["replay_stored"] <= 9  # this batch and two earlier ones
    assert "replay_age_max" not in mixed[0].meta


async def test_the_age_is_that_of_the_oldest_token() -> None:
    class Mixed(Versioned):
        async def next_batch(self) -> SAWBatch:
            batch = await super().next_batch()
            for item in batch.items:
                versions = item.attachments.versions
                assert versions is not None
                versions[0] = max(self.count - 3, 0)  # sampled across two updates
            return batch

    mixed = await batches(ReplayBufferSource(Mixed(), max_age=3), 8)
    assert {b.meta["replay_age_max"] for b in mixed[4:]} == {3}


async def test_with_a_half_life_recent_groups_are_drawn_more_often() -> None:
    source = ReplayBufferSource(Versioned(rollouts=2), share=0.5, max_age=4, half_life=1.0)
    ages = [int(b.meta["replay_age_max"]) for b in (await batches(source, 700))[5:]]
    counts = np.bincount(ages, minlength=5)[1:] / len(ages)
    # One group of each age, one is drawn: 8/15, 4/15, 2/15, 1/15.
    assert counts == pytest.approx(np.array([8, 4, 2, 1]) / 15, abs=0.06)
    plain_draw = ReplayBufferSource(Versioned(rollouts=2), share=0.5, max_age=4)
    ages = [int(b.meta["replay_age_max"]) for b in (await batches(plain_draw, 700))[5:]]
    assert np.bincount(ages, minlength=5)[1:] / len(ages) == pytest.approx(0.25, abs=0.06)


async def test_the_draw_depends_on_the_seed_and_on_nothing_else() -> None:
    made = [
        [groups(b) for b in await batches(ReplayBufferSource(Versioned(), seed=seed), 6)]
        for seed in (1, 1, 2)
    ]
    assert made[0] == made[1]
    assert made[0] != made[2]


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
async def test_after_a_resume_every_batch_is_what_it_would_have_been(stop: int) -> None:
    settings: dict[str, Any] = {"share": 0.7, "max_age": 3, "half_life": 2.0, "seed": 4}
    whole = await batches(ReplayBufferSource(Versioned(), **settings), 9)
    first = ReplayBufferSource(Versioned(), **settings)
    await batches(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    await first.next_batch()  # what happens after the state was taken does not change it
    again = ReplayBufferSource(Versioned(), **settings)
    again.load_state_dict(state)
    for expected, found in zip(whole[stop:], await batches(again, 9 - stop), strict=True):
        assert plain(found.items) == plain(expected.items)
        assert (found.counts, found.meta) == (expected.counts, expected.meta)


def train(folder: Path, source: Any, steps: int, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = Trainer(
        model=tiny_model(hidden_size=16, layers=1, heads=2, kv_heads=1),
        algo=reinforce(),
        batch_source=source,
        cfg=TrainerConfig(
            learning_rate=1e-3,
            max_seq_len=64,
            run_dir=folder,
            checkpoint=CheckpointConfig(folder / "checkpoints", every=1),
            **settings,
        ),
    )
    trainer.train_sync(steps)
    trainer.close()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trainer_that_is_resumed_ends_with_the_same_weights(
    tmp_path: Path, overlap: bool
) -> None:
    def source() -> ReplayBufferSource:
        return ReplayBufferSource(Versioned(), max_age=3)

    whole = train(tmp_path / "whole", source(), 6, overlap=overlap)
    train(tmp_path / "part", source(), 3, overlap=overlap)
    again = train(tmp_path / "part", source(), 6, overlap=overlap)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    lines = [json.loads(line) for line in (tmp_path / "part/metrics.jsonl").open()]
    assert [line["train/replay_share"] for line in lines] == [0.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert lines[-1]["train/replay_age_max"] <= 3
    assert lines[-1]["train/staleness_max"] >= lines[-1]["train/replay_age_max"]


def test_corrections_see_the_log_probs_of_the_time_of_sampling(tmp_path: Path) -> None:
    """A group from before the policy moved has the ratio of the policy now to the one then."""
    moved = tiny_model(hidden_size=16, layers=1, heads=2, kv_heads=1)
    algo = make_grpo(group_size=2)
    algo = replace(algo, loss=CorrectedLoss(algo.loss, TruncatedImportance(2.0)))
    source = ReplayBufferSource(Versioned(), share=0.5, max_age=9)
    trainer = Trainer(
        model=moved,
        algo=algo,
        batch_source=source,
        cfg=TrainerConfig(learning_rate=0.05, max_seq_len=64, run_dir=tmp_path),
    )
    trainer.train_sync(3)
    trainer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert lines[-1]["train/staleness_max"] == 2
    assert lines[-1]["train/correction_token_truncated_fraction"] > 0


async def test_what_cannot_be_corrected_is_refused() -> None:
    class Silent(Versioned):
        async def next_batch(self) -> SAWBatch:
            batch = await super().next_batch()
            return make_batch(
                structs.replace(
                    i, attachments=structs.replace(i.attachments, behavior_logprobs=None)
                )
                for i in batch.items
            )

    for algorithm in (None, make_grpo(group_size=2)):
        source = Silent()
        source.algorithm = algorithm
        with pytest.raises(NotTrainableError, match=r"no behaviour log-probs.*ReturnSpec"):
            await ReplayBufferSource(source).next_batch()
    supervised = Silent()
    supervised.algorithm = make_sft()  # its loss has no ratio
    mixed = await batches(ReplayBufferSource(supervised), 2)
    assert mixed[1].meta["replay_share"] == 0.5


async def test_samples_of_an_unknown_policy_have_no_age_and_are_refused() -> None:
    class Unknown(SyntheticSource):
        async def next_batch(self) -> SAWBatch:
            batch = await super().next_batch()
            return make_batch(of_version(item, -1) for item in batch.items)

    with pytest.raises(NotTrainableError, match="which policy version"):
        await ReplayBufferSource(Unknown()).next_batch()


async def test_a_group_that_comes_twice_is_refused() -> None:
    class Again(Versioned):
        async def next_batch(self) -> SAWBatch:
            return synthetic_batch(1)

    source = ReplayBufferSource(Again())
    await source.next_batch()
    with pytest.raises(BatchError, match=r"1-g0.*already"):
        await source.next_batch()


async def test_a_batch_without_items_passes_through() -> None:
    class Empty:
        async def next_batch(self) -> SAWBatch:
            return make_batch([], {"dropped": {"cut": 3}})

    source = ReplayBufferSource(Empty())
    assert (await source.next_batch()).meta == {"dropped": {"cut": 3}}
    assert source.step == 0


async def test_it_passes_on_what_the_trainer_tells_its_source() -> None:
    class Listening(Versioned):
        flushed = 0
        heard: tuple[Mapping[str, Any], ...] = ()

        async def flush_record(self) -> None:
            self.flushed += 1

        def committed(self, state: Mapping[str, Any]) -> None:
            self.heard = (*self.heard, state)

    inner = Listening()
    inner.algorithm = make_grpo(group_size=2)
    source = SamplingAhead(ReplayBufferSource(inner))
    assert source.algorithm is inner.algorithm
    await source.next_batch()
    await source.flush_record()
    source.committed(source.state_dict())
    assert (inner.flushed, inner.heard) == (1, ({"count": 1},))


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": 1.0}, {"max_age": 0}, {"half_life": 0.0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReplayBufferSource(Versioned(), **wrong)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"step": 1},
        {"step": 1, "stored": ["?"], "source": None},
        {"step": 1, "stored": ["AAAA"]},
    ],
)
def test_another_sources_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="ReplayBufferSource"):
        ReplayBufferSource(Versioned()).load_state_dict(state)


@given(st.integers(0, 2**31 - 1))
def test_a_group_survives_its_way_through_a_checkpoint(seed: int) -> None:
    batch = synthetic_batch(seed)
    group = StoredGroup("a", batch.items)
    back = StoredGroup.unpacked(group.packed)
    assert back.name == "a"
    assert plain(back.items) == plain(group.items)
    for one, other in zip(group.items, back.items, strict=True):
        assert one.input_ids.dtype == other.input_ids.dtype
        assert one.action_mask.dtype == other.action_mask.dtype
