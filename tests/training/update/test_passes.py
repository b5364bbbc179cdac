"""What each rank computes of a batch, and how a batch is split for several updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import OutOfMemoryError
from ludic.inference.tiny import tiny_model
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch
from ludic.sharding.world import World
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.config import TrainerConfig
from ludic.training.metrics.stats import StatBuffer, Workload
from ludic.training.types import Loss, Scope, TokenLogProbs
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import Layout, lay_out
from ludic.training.update.passes import Passes, mini_batches
from ludic.training.update.planning import Cost, workload
from ludic.training.update.policy import Policy
from ludic.training.update.scores import mean_kl
from tests.training.synthetic import synthetic_batch

BUDGET = 64


def passes(rank: int = 0, size: int = 1, *, loss: Loss | None = None) -> Passes:
    """The passes of one of several ranks; what they exchange is left to the test."""
    cfg = TrainerConfig(micro_token_budget=BUDGET, max_seq_len=BUDGET)
    loss = loss or make_grpo(group_size=2).loss
    return Passes(Policy(tiny_model().double()), loss, cfg, World(rank, size), Cost())


class Kept:
    """Stands for the record of scores: which items were kept, and how many tokens."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.tokens = 0

    def add(self, items: Sequence[int], scored: TokenLogProbs) -> None:
        self.items += items
        self.tokens += len(scored.logprobs)


def accumulated(
    ours: Passes, layout: Layout
) -> tuple[dict[str, Tensor], dict[str, float], Kept, Workload]:
    optimizer = MasterAdamW(ours.policy.model.named_parameters(), ours.cfg)
    stats, kept = StatBuffer(), Kept()
    numbers = range(100, 100 + len(layout.items))
    work = ours.accumulate(
        layout, optimizer, stats, version=0, proximal=None, keep=(kept, numbers)  # type: ignore[arg-type]
    )  # fmt: skip
    gradients = {n: m.grad for n, m in optimizer.masters.items() if m.grad is not None}
    return gradients, stats.reduce(None, optimizer.gradient_norm()), kept, work


@pytest.mark.parametrize("rollouts", [1, 9])
def test_the_mean_over_ranks_is_the_gradient_of_one_rank_alone(rollouts: int) -> None:
    # FSDP takes the mean. With one rollout, the second rank has no work.
    layout = lay_out(synthetic_batch(4, rollouts))
    alone, metrics, kept, work = accumulated(passes(), layout)
    ranks = [accumulated(passes(rank, 2), layout) for rank in (0, 1)]
    for name, gradient in alone.items():
        mean = (ranks[0][0][name] + ranks[1][0][name]) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-9, atol=1e-12)
    assert sorted(kept.items) == sorted(ranks[0][2].items + ranks[1][2].items)
    assert sorted(kept.items) == list(range(100, 100 + rollouts))
    assert kept.tokens == ranks[0][2].tokens + ranks[1][2].tokens
    assert ranks[0][3] == ranks[1][3]
    assert ranks[0][3].tokens == work.tokens
    if rollouts == 1:
        assert ranks[0][1]["train/loss"] == pytest.approx(metrics["train/loss"])
        assert all(not gradient.any() for gradient in ranks[1][0].values())


def test_a_rank_without_work_repeats_the_least_there_is() -> None:
    layout = lay_out(synthetic_batch(0, 3))
    plans = []
    for rank in (0, 1):
        ours = passes(rank, 2)
        ours.policy.one_at_a_time("a test")
        plans.append(ours.plan(layout)[0])
    assert [len(plan) for plan in plans] == [2, 2]
    flat = [part for plan in plans for part in plan]
    assert sorted(indices for indices, counted in flat if counted) == [(0,), (1,), (2,)]
    (idle,) = [indices for indices, counted in flat if not counted]
    sizes = {i: workload(layout, (i,), Cost(), shares=False).tokens for i in range(3)}
    assert idle == (min(sizes, key=sizes.__getitem__),)


def test_the_scores_of_the_ranks_add_up_to_those_of_one() -> None:
    batch = synthetic_batch(6, 7)
    alone = passes().score(batch)
    assert [len(scores) for scores in alone] == [p.actions.size for p in lay_out(batch).packed]
    ranks = [passes(rank, 2).score(batch) for rank in (0, 1)]
    for whole, first, second in zip(alone, *ranks, strict=True):
        assert not (first.any() and second.any())
        np.testing.assert_allclose(first + second, whole, rtol=1e-5)


class Failing:
    """A loss that ends as an allocation, or anything else, may end."""

    needs_logits = False
    scope: Scope = "token"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def compute(self, *args: Any) -> Any:
        raise self.error


def test_only_a_lack_of_memory_is_called_one() -> None:
    layout = lay_out(synthetic_batch(0, 2))
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
    with pytest.raises(OutOfMemoryError, match="not even with their activations dropped"):
        accumulated(passes(loss=Failing(full)), layout)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        accumulated(passes(loss=Failing(RuntimeError("shapes do not match"))), layout)


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(max_seq_len=64, **changes)


def two_rows_each(rollouts: int) -> SAWBatch:
    items = synthetic_batch(0, 2 * rollouts).items
    return make_batch([replace(i, rollout_id=f"r{n % rollouts}") for n, i in enumerate(items)])


def test_mini_batches_hold_every_row_once_an_epoch_and_rollouts_whole() -> None:
    batch = two_rows_each(5)
    parts = mini_batches(batch, config(epochs=2, mini_batches=2), step=0)
    assert len(parts) == 4
    for epoch in (parts[:2], parts[2:]):
        assert sorted(i for part in epoch for i in part.members) == list(range(10))
    for part in parts:
        names = [batch.items[i].rollout_id for i in part.members]
        assert all(names.count(name) == 2 for name in names)
        assert part.layout.counts.rollouts == len(set(names))
        assert [i.rollout_id for i in part.layout.items] == names
        assert list(part.members) == sorted(part.members)
    assert {len(part.members) for part in parts} == {4, 6}


def test_mini_batches_are_drawn_anew_each_step_and_epoch_and_repeat_with_the_seed() -> None:
    batch = synthetic_batch(0, 12)

    def drawn(step: int, **changes: Any) -> list[tuple[int, ...]]:
        cfg = config(epochs=2, mini_batches=3, **changes)
        return [part.members for part in mini_batches(batch, cfg, step=step)]

    first = drawn(0)
    assert drawn(0) == first
    assert first[:3] != first[3:]
    assert drawn(1) != first
    assert drawn(0, seed=1) != first


def test_rows_without_a_rollout_are_split_one_by_one() -> None:
    batch = make_batch([replace(i, rollout_id="") for i in synthetic_batch(0, 4).items])
    parts = mini_batches(batch, config(mini_batches=9), step=0)
    assert sorted(part.members for part in parts) == [(0,), (1,), (2,), (3,)]


def logs(*values: float) -> NDArray[np.float32]:
    return np.log(np.array(values, np.float32))


def test_the_drift_of_an_update_is_its_kl_per_token() -> None:
    before = [logs(0.5, 0.25), logs(0.125)]
    after = [logs(0.25, 0.5), logs(0.125)]
    ratios = np.array([0.5, 2.0, 1.0])
    assert mean_kl(before, after) == pytest.approx(np.mean(ratios - 1 - np.log(ratios)), rel=1e-6)
    assert mean_kl(before, before) == 0.0
    here, gone = [logs(0.5)], [np.array([-500.0], np.float32)]
    assert 0 < mean_kl(here, gone) < mean_kl(gone, here) < np.inf
