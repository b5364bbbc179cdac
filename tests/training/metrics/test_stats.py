"""Statistics are those of the tokens, however they were split."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.saw.items import UNKNOWN_VERSION, BatchCounts
from ludic.training.metrics.stats import (
    Clock,
    ModelFlops,
    StatBuffer,
    named,
    over_steps,
    policy_stats,
)
from ludic.training.types import LossBatch, Stat, TokenLogProbs


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(1, 5))
def test_a_mean_is_weighted_by_tokens_and_not_by_micro_batches(
    values: list[float], size: int
) -> None:
    whole, buffer = torch.tensor(values, dtype=torch.float64), StatBuffer()
    for start in range(0, len(values), size):
        part = whole[start : start + size]
        buffer.add(
            {
                "m": Stat.mean(part),
                "s": Stat.sum(part.sum()),
                "hi": Stat.max(part),
                "lo": Stat.min(part),
            }
        )
    found = buffer.reduce()
    assert found["train/m"] == pytest.approx(float(whole.mean()), abs=1e-9)
    assert found["train/s"] == pytest.approx(float(whole.sum()), abs=1e-9)
    assert found["train/hi"] == max(values)
    assert found["train/lo"] == min(values)


def test_what_is_not_counted_changes_nothing() -> None:
    buffer = StatBuffer()
    values = torch.tensor([1.0, 2.0])
    stats = {"m": Stat.mean(values), "hi": Stat.max(values), "lo": Stat.min(values)}
    buffer.add(stats)
    wild = torch.tensor([-100.0, 100.0, 5.0])
    buffer.add(
        {"m": Stat.mean(wild), "hi": Stat.max(wild), "lo": Stat.min(wild)},
        counted=False,
    )
    assert buffer.reduce() == {"train/m": 1.5, "train/hi": 2.0, "train/lo": 1.0}
    assert buffer.reduce() == {}


def test_names_get_a_canonical_prefix() -> None:
    assert named("loss") == "train/loss"
    assert named("perf/x") == "perf/x"
    assert named("eval/accuracy") == "eval/accuracy"


def test_mismatch_is_measured_before_any_clipping() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    ids = torch.zeros(3, dtype=torch.int64)
    batch = LossBatch(
        weights=torch.ones(3),
        turn_ids=ids,
        rollout_ids=ids,
        group_ids=ids,
        turn_lengths=torch.tensor([3]),
        rollout_lengths=torch.tensor([3]),
        group_lengths=torch.tensor([3]),
        counts=BatchCounts(3, 1, 1, 1),
        behavior_logprobs=torch.tensor([-1.0, -2.5, -13.0]),
        versions=torch.tensor([5, 4, 2]),
    )
    buffer = StatBuffer()
    buffer.add(policy_stats(TokenLogProbs(logprobs), batch, 5))
    found = buffer.reduce()
    assert found["train/mismatch_abs"] == pytest.approx(10.5 / 3)
    assert found["train/mismatch_max"] == 10.0
    assert found["train/mismatch_kl"] == pytest.approx(-10.5 / 3)
    assert found["train/mismatch_ratio"] == pytest.approx((1 + math.exp(0.5) + math.exp(10)) / 3)
    assert found["train/staleness_mean"] == pytest.approx(4 / 3)
    assert found["train/staleness_max"] == 3.0
    # After the first of several steps, the policy is no longer the one that the update began with.
    began = replace(batch, proximal_logprobs=torch.tensor([-1.0, -2.0, -12.0]))
    buffer.add(policy_stats(TokenLogProbs(logprobs - 5.0), began, 5))
    assert buffer.reduce()["train/mismatch_abs"] == pytest.approx(1.5 / 3)


def test_several_steps_give_one_line() -> None:
    first = {"train/loss": 1.0, "train/staleness_max": 3.0, "train/lag_min": 1.0, "train/once": 2.0}
    second = {"train/loss": 2.0, "train/staleness_max": 5.0, "train/lag_min": 0.0}
    assert over_steps([first, second]) == {
        "train/loss": 1.5,
        "train/staleness_max": 5.0,
        "train/lag_min": 0.0,
        "train/once": 2.0,
    }
    opposite = [{"train/loss": math.inf}, {"train/loss": -math.inf}]
    assert math.isnan(over_steps(opposite)["train/loss"])


def test_operations_are_six_per_parameter_used_and_attention() -> None:
    from ludic.inference.tiny import tiny_model

    model = tiny_model(hidden_size=64, layers=2)
    flops = ModelFlops(model)
    head = model.lm_head.weight.numel()
    rest = sum(p.numel() for p in model.parameters()) - head
    assert flops.of(30, 100 + 400, 7) == 6 * rest * 30 + 6 * head * 7 + 6 * 2 * 64 * (100 + 400)


def test_laps_add_up_to_the_elapsed_time() -> None:
    clock = Clock()
    for name in ("a", "b", "a"):
        clock.lap(name)
    assert sum(clock.laps.values()) == pytest.approx(clock.elapsed)


def test_unknown_versions_have_no_age() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    batch = LossBatch(
        weights=torch.ones(3),
        turn_ids=ids,
        rollout_ids=ids,
        group_ids=ids,
        turn_lengths=torch.tensor([3]),
        rollout_lengths=torch.tensor([3]),
        group_lengths=torch.tensor([3]),
        counts=BatchCounts(3, 1, 1, 1),
        versions=torch.tensor([2, UNKNOWN_VERSION, 2]),
    )
    policy, buffer = TokenLogProbs(torch.zeros(3)), StatBuffer()
    buffer.add(policy_stats(policy, batch, 7))
    found = buffer.reduce()
    assert (found["train/staleness_mean"], found["train/staleness_max"]) == (5.0, 5.0)
    nothing = replace(batch, versions=torch.full((3,), UNKNOWN_VERSION))
    buffer.add(policy_stats(policy, nothing, 7))
    assert not any("staleness" in name for name in buffer.reduce())
