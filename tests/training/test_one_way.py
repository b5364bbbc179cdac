"""One way for the data: every source's batches get credit, preparation and state once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ludic.errors import BatchError, ConfigError
from ludic.inference.tiny import tiny_model
from ludic.saw import make_batch
from ludic.saw.items import SAWBatch
from ludic.training.algorithm import RLAlgorithm
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.algorithms.reinforce import ReinforceLoss, make_reinforce
from ludic.training.algorithms.reinforce_baseline import make_reinforce_baseline
from ludic.training.algorithms.scalerl import make_scalerl
from ludic.training.algorithms.spo import make_spo
from ludic.training.batching import SamplingAhead
from ludic.training.batching.scoring import ReferenceScorer, ScoredBatchSource
from ludic.training.batching.source import WorksAhead
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.preprocess import KLInReward, subtract_mean, turn_weights
from ludic.training.trainer import Trainer
from ludic.training.update.passes import mini_batches
from tests.training.synthetic import SyntheticSource, synthetic_batch


class Given:
    """A batch source of one's own: batches that were made beforehand, in turn."""

    def __init__(self, *batches: SAWBatch) -> None:
        self.batches = list(batches)

    async def next_batch(self) -> SAWBatch:
        if not self.batches:
            raise StopAsyncIteration
        return self.batches.pop(0)


class Knowing(Given):
    """A source that assigns credit by an algorithm."""

    def __init__(self, algorithm: RLAlgorithm | None, *batches: SAWBatch) -> None:
        super().__init__(*batches)
        self.algorithm = algorithm


class Fixed:
    """A reference that finds every token equally likely."""

    async def logprobs(self, items: Any) -> list[Any]:
        return [np.full(int(i.action_mask.sum()), -5.0, dtype=np.float32) for i in items]


def trained_on(
    monkeypatch: pytest.MonkeyPatch, source: Any, algo: RLAlgorithm | None = None, **changes: Any
) -> list[SAWBatch]:
    """The batches as the trainer splits them, after two steps at most."""
    from ludic.training import trainer as module

    seen: list[SAWBatch] = []
    split = mini_batches

    def record(batch: SAWBatch, *args: Any, **kwargs: Any) -> Any:
        seen.append(batch)
        return split(batch, *args, **kwargs)

    monkeypatch.setattr(module, "mini_batches", record)
    cfg = TrainerConfig(max_seq_len=64, micro_token_budget=512, **changes)
    trainer = Trainer(model=tiny_model(), algo=algo, batch_source=source, cfg=cfg)
    trainer.train_sync(2)
    trainer.close()
    return seen


def weights(batch: SAWBatch) -> list[float]:
    return list(turn_weights(batch).values())


def without_credit(batch: SAWBatch, groups: set[str | None]) -> SAWBatch:
    """The batch with weight 0 for all turns of these groups."""
    items = [
        i
        if i.group_id not in groups
        else replace(
            i,
            turns=tuple(replace(t, weight=0.0) for t in i.turns),
            attachments=replace(
                i.attachments, token_weights=np.zeros_like(i.attachments.token_weights)
            ),
        )
        for i in batch.items
    ]
    return make_batch(items, batch.meta)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_baseline_is_taken_off_once_whatever_the_source(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    made = [synthetic_batch(1), synthetic_batch(2)]
    seen = trained_on(monkeypatch, Given(*made), make_reinforce_baseline(), overlap=overlap)
    assert len(seen) == 2
    for batch, before in zip(seen, made, strict=True):
        assert weights(batch) == pytest.approx(weights(subtract_mean(before)))
        assert np.mean(weights(batch)) == pytest.approx(0, abs=1e-6)
        assert abs(np.mean(weights(before))) > 0.01


def test_groups_without_variance_are_dropped_whatever_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = synthetic_batch(1)
    gone = batch.items[0].group_id
    seen = trained_on(monkeypatch, Given(without_credit(batch, {gone})), make_scalerl(2))
    assert gone not in {i.group_id for i in seen[0].items}
    assert seen[0].counts.groups == batch.counts.groups - 1
    assert seen[0].meta["dropped"]["zero_variance_group"] > 0


def test_a_batch_of_which_nothing_is_left_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, full = synthetic_batch(1), synthetic_batch(2)
    empty = without_credit(empty, {i.group_id for i in empty.items})
    (seen,) = trained_on(monkeypatch, Given(empty, full), make_scalerl(2))
    assert weights(seen) == weights(full)
    assert seen.meta["dropped"]["zero_variance_group"] == empty.counts.turns


def test_a_source_that_never_leaves_anything_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = synthetic_batch(1)
    empty = without_credit(batch, {i.group_id for i in batch.items})
    with pytest.raises(BatchError, match=r"nothing to train on.*zero_variance_group"):
        trained_on(monkeypatch, Given(*[empty] * 20), make_scalerl(2))


def test_scorers_come_before_the_preprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    algo = RLAlgorithm(
        "kl", ConstantCredit(), ReinforceLoss(), preprocess=KLInReward(0.1, horizon="token")
    )
    batch = synthetic_batch(1)
    source = ScoredBatchSource(Given(batch), [ReferenceScorer(Fixed())])
    (seen,) = trained_on(monkeypatch, source, algo)
    for item, before in zip(seen.items, batch.items, strict=True):
        sampled = before.attachments.behavior_logprobs
        charged = before.attachments.token_weights - 0.1 * (sampled + 5.0)  # type: ignore[operator]
        assert item.attachments.token_weights == pytest.approx(charged, abs=1e-6)


def test_the_algorithm_may_be_left_to_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    algo = make_reinforce_baseline()
    for source in (
        Knowing(algo, synthetic_batch(1)),
        SamplingAhead(Knowing(algo, synthetic_batch(1))),
        ScoredBatchSource(Knowing(algo, synthetic_batch(1)), []),
    ):
        (seen,) = trained_on(monkeypatch, source)
        assert np.mean(weights(seen)) == pytest.approx(0, abs=1e-6)


def trainer_of(algo: RLAlgorithm | None, source: Any, **options: Any) -> Trainer:
    return Trainer(model=tiny_model(), algo=algo, batch_source=source, **options)


def test_two_different_algorithms_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'grpo'.*another 'reinforce'"):
        trainer_of(make_grpo(2), Knowing(make_reinforce()))
    with pytest.raises(ConfigError, match="the same object"):  # each would have its own memory
        trainer_of(make_spo(), Knowing(make_spo()))
    with pytest.raises(ConfigError, match="there is no algorithm"):
        trainer_of(None, Given())
    with pytest.raises(ConfigError, match="there is no algorithm"):
        trainer_of(None, Knowing(None))
    for same in (
        trainer_of(make_grpo(2), Knowing(make_grpo(2))),
        trainer_of(None, Knowing(make_spo())),
    ):
        same.close()


def test_overlap_wraps_a_source_and_leaves_one_that_works_ahead_as_it_is() -> None:
    cfg = TrainerConfig(overlap=True)
    wrapped = trainer_of(make_reinforce(), SyntheticSource(), cfg=cfg)
    assert isinstance(wrapped.source, SamplingAhead)
    assert isinstance(wrapped.source, WorksAhead)
    ready = SamplingAhead(SyntheticSource())
    kept = trainer_of(make_reinforce(), ready, cfg=cfg)
    assert kept.source is ready
    wrapped.close()
    kept.close()


def test_nothing_is_made_past_the_goal() -> None:
    source = SyntheticSource()
    cfg = TrainerConfig(max_seq_len=64, micro_token_budget=512, overlap=True)
    trainer = trainer_of(make_reinforce(), source, cfg=cfg)
    trainer.train_sync(3)
    trainer.close()
    assert source.count == 3


def test_a_checkpoint_written_with_overlap_goes_on_without_it(tmp_path: Path) -> None:
    def run(steps: int, overlap: bool) -> SyntheticSource:
        source = SyntheticSource()
        cfg = TrainerConfig(
            max_seq_len=64,
            micro_token_budget=512,
            overlap=overlap,
            checkpoint=CheckpointConfig(tmp_path / "ck", every=1),
        )
        trainer = trainer_of(make_reinforce(), source, cfg=cfg)
        trainer.train_sync(steps)
        trainer.close()
        return source

    run(2, overlap=True)
    assert run(4, overlap=False).count == 4
    manifest = json.loads((tmp_path / "ck/step-00000004/manifest.json").read_text())
    assert manifest["state"]["parts"]["batch_source"] == {"count": 4}


async def test_an_error_while_working_ahead_comes_with_the_batch_it_was_for() -> None:
    class Failing(SyntheticSource):
        async def next_batch(self) -> SAWBatch:
            if self.count:
                raise BatchError("the second batch is broken")
            return await super().next_batch()

    source = SamplingAhead(Failing())
    await source.next_batch()
    source.start_ahead()
    await source.settle()
    with pytest.raises(BatchError, match="second"):
        await source.next_batch()


async def test_a_batch_that_was_begun_can_be_dropped() -> None:
    class Endless(SyntheticSource):
        async def next_batch(self) -> SAWBatch:
            await asyncio.Event().wait()
            raise AssertionError

    source = SamplingAhead(Endless())
    source.start_ahead()
    await asyncio.sleep(0)
    await source.drop_ahead()
    await source.settle()


def test_no_figure_of_a_step_overwrites_another(tmp_path: Path) -> None:
    """Figures of the batch and of the update are logged under names of their own."""
    names = {"version_max", "rollouts_sampled", "items", "tokens", "reward_mean", "episodes"}
    batch = synthetic_batch(1)
    batch = replace(batch, meta={**batch.meta, **dict.fromkeys(names, 12345.0)})
    cfg = TrainerConfig(max_seq_len=64, micro_token_budget=512, run_dir=tmp_path)
    trainer = trainer_of(make_reinforce(), Given(batch), cfg=cfg)
    trainer.train_sync(1)
    trainer.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {k for k, v in line.items() if v == 12345.0} == {f"train/{n}" for n in names}
    assert line["train/rollouts"] == batch.counts.rollouts


class TwoRanks:
    """Stands for the ranks of a trainer: what rank 0 tells is kept, and told to both."""

    size = 2

    def __init__(self, leads: bool, told: dict[str, Any] | None = None) -> None:
        self.leads, self.told = leads, told

    def share(self, told: dict[str, Any]) -> dict[str, Any]:
        if self.leads:
            self.told = told
        assert self.told is not None
        return self.told


async def test_whatever_goes_wrong_on_rank_0_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(batch: SAWBatch) -> Any:
        raise TypeError("no wire for this")

    monkeypatch.setattr("ludic.training.batching.source.batch_to_dict", cannot)
    trainer = trainer_of(make_reinforce(), Given(synthetic_batch(1)))
    first = TwoRanks(leads=True)
    trainer.intake.world = first  # type: ignore[assignment]
    with pytest.raises(TypeError, match="no wire"):
        await trainer.intake.next_batch(trainer.source, 0)
    trainer.intake.world = TwoRanks(leads=False, told=first.told)  # type: ignore[assignment]
    with pytest.raises(BatchError, match=r"rank 0 has no batch.*no wire"):
        await trainer.intake.next_batch(trainer.source, 0)
    trainer.close()
