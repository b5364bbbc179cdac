"""Intervals cover, pass@k is unbiased, and the paired test holds its level."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import DataError
from ludic.eval.statistics import (
    Estimate,
    PairedComparison,
    compare_paired,
    mean,
    pass_at_k,
    proportion,
    t_quantile,
)

Draw = Callable[[np.random.Generator, int], np.ndarray]


def test_wilson_interval_matches_the_value_worked_out_by_hand() -> None:
    # p = 0.5, n = 100, z = 1.959964: centre 0.5, half width z·√(0.0025 + z²/40000)/(1 + z²/100)
    estimate = proportion(50, 100)
    assert estimate.low == pytest.approx(0.40383, abs=1e-5)
    assert estimate.high == pytest.approx(0.59617, abs=1e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_rate_lies_in_its_interval_and_the_interval_in_the_unit(case: tuple[int, int]) -> None:
    successes, n = case
    estimate = proportion(successes, n)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_the_interval_of_a_rate_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = [proportion(int(rng.binomial(200, 0.3)), 200) for _ in range(2000)]
    coverage = np.mean([e.low <= 0.3 <= e.high for e in hits])
    assert 0.93 <= coverage <= 0.97


def test_no_observations_say_nothing() -> None:
    estimate = proportion(0, 0)
    assert math.isnan(estimate.value)
    assert (estimate.low, estimate.high) == (0, 1)


def test_the_interval_of_a_mean_holds_the_mean_and_shrinks_with_n() -> None:
    rng = np.random.default_rng(1)
    few, many = mean(rng.normal(size=20).tolist()), mean(rng.normal(size=2000).tolist())
    assert few.low < few.value < few.high
    assert many.high - many.low < few.high - few.low


@given(
    st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_equals_the_enumeration_of_all_draws(case: tuple[int, int, int]) -> None:
    n, correct, k = case
    labels = [1] * correct + [0] * (n - correct)
    draws = list(itertools.combinations(labels, k))
    assert pass_at_k(n, correct, k) == pytest.approx(np.mean([any(d) for d in draws]))


def test_pass_at_k_refuses_more_draws_than_samples() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def test_a_paired_test_sees_a_difference_that_is_there_and_none_that_is_not() -> None:
    rng = np.random.default_rng(2)
    a = rng.integers(0, 2, 400).astype(float)
    better = np.maximum(a, rng.random(400) < 0.2)
    assert compare_paired(a.tolist(), better.tolist()).p_value < 0.001
    assert compare_paired(a.tolist(), a.tolist()).p_value == 1.0


def test_the_exact_paired_test_agrees_with_the_sign_test_by_hand() -> None:
    # Six pairs, all differences +1: 2 of 64 sign patterns are as extreme, and count half.
    assert compare_paired([0.0] * 6, [1.0] * 6).p_value == pytest.approx(1 / 64)
    # Five and one: 2 patterns are larger, 12 as large.
    assert compare_paired([0.0] * 5 + [1.0], [1.0] * 5 + [0.0]).p_value == pytest.approx(8 / 64)


def test_a_paired_test_keeps_its_level_under_exchangeability() -> None:
    rng = np.random.default_rng(3)
    rejected = 0
    for seed in range(200):
        x, y = rng.integers(0, 2, (2, 60)).astype(float)
        rejected += compare_paired(x.tolist(), y.tolist(), seed=seed).p_value < 0.05
    assert 0.01 <= rejected / 200 <= 0.09


def test_samples_of_one_task_are_one_observation() -> None:
    tasks = [task for task in range(6) for _ in range(8)]
    values = [float(task % 2) for task in tasks]
    clustered = mean(values, tasks=tasks, bounds=(0.0, 1.0))
    assert (clustered.value, clustered.n) == (0.5, 48)
    apart = proportion(3, 6)
    assert (clustered.low, clustered.high) == pytest.approx((apart.low, apart.high))
    alone = mean(values, tasks=list(range(48)))
    assert alone.high - alone.low < (clustered.high - clustered.low) / 2
    # Of a single task, its samples are all there is.
    assert mean(values, tasks=["same"] * 48) == alone


def test_tasks_with_more_samples_count_by_their_samples() -> None:
    values, tasks = [1.0, 1.0, 1.0, 0.0, 0.2], ["a", "a", "a", "b", "c"]
    found = mean(values, tasks=tasks)
    assert found.value == pytest.approx(np.mean(values))
    assert found.low <= found.value <= found.high


def test_a_paired_test_counts_tasks_and_not_their_samples() -> None:
    tasks = [task for task in range(4) for _ in range(10)]
    found = compare_paired([0.0] * 40, [1.0] * 40, tasks=tasks)
    assert found.p_value == pytest.approx(1 / 16)  # four tasks, all one way
    assert found.difference.value == 1


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.70620), (2, 4.30265), (11, 2.20099), (30, 2.04227), (1200, 1.96195)]
)
def test_quantiles_of_students_t_are_those_of_the_tables(df: int, quantile: float) -> None:
    assert t_quantile(0.975, df) == pytest.approx(quantile, abs=2e-5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_a_mean_lies_in_its_interval(values: list[float]) -> None:
    found = mean(values)
    slack = 1e-9 * max(map(abs, values))
    assert found.low - slack <= found.value <= found.high + slack


@pytest.mark.parametrize("value", [1e308, math.inf, math.nan])
def test_values_too_large_to_average_are_named(value: float) -> None:
    with pytest.raises(DataError, match=r"(1e\+308|inf|nan) cannot be averaged.*scale the rewards"):
        mean([0.0, value])


def binary(p: float) -> Draw:
    return lambda rng, n: (rng.random(n) < p).astype(float)


REWARDS: dict[str, tuple[Draw, float]] = {
    "success or failure": (binary(0.3), 0.3),
    "shares": (lambda rng, n: rng.random(n), 0.5),
    "mostly small shares": (lambda rng, n: rng.beta(0.5, 2, n), 0.2),
    "win, draw or loss": (lambda rng, n: rng.choice([-1, 0, 1], n, p=[0.3, 0.3, 0.4]), 0.1),
    "scores": (lambda rng, n: rng.normal(30, 20, n), 30),
    "skewed scores": (lambda rng, n: rng.exponential(20, n), 20),
}


def coverage(estimate: Callable[[np.random.Generator], Estimate], truth: float, runs: int) -> float:
    rng = np.random.default_rng(4)
    found = [estimate(rng) for _ in range(runs)]
    share = float(np.mean([e.low <= truth <= e.high for e in found]))
    print(f"covers {share:.1%} of {runs}")
    return share


def of_tasks(rng: np.random.Generator, tasks: int = 25, samples: int = 8) -> Estimate:
    """Success in several samples of tasks that are hard or easy."""
    chances = rng.beta(0.5, 0.5, tasks)
    values = rng.random((tasks, samples)) < chances[:, None]
    names = np.repeat(np.arange(tasks), samples).tolist()
    return mean(values.ravel().astype(float).tolist(), tasks=names, bounds=(0.0, 1.0))


def of_two_seats(rng: np.random.Generator, episodes: int = 40) -> Estimate:
    """Success of both seats of a game that one of them wins, unless it is a draw."""
    return mean((0.5 * (rng.random(episodes) < 0.6)).tolist(), bounds=(0.0, 1.0))


def paired(rng: np.random.Generator, n: int, draw: Draw) -> PairedComparison:
    return compare_paired(draw(rng, n).tolist(), draw(rng, n).tolist())


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    for draw, truth in REWARDS.values():
        found = coverage(lambda rng, draw=draw: mean(draw(rng, 12).tolist()), truth, 400)  # type: ignore[misc]
        assert 0.91 <= found <= 0.985
    assert 0.91 <= coverage(of_tasks, 0.5, 400) <= 0.985
    assert 0.91 <= coverage(of_two_seats, 0.3, 400) <= 0.985


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", [12, 50])
@pytest.mark.parametrize("name", REWARDS)
def test_the_interval_of_a_mean_reward_covers_the_truth_at_every_size(name: str, n: int) -> None:
    draw, truth = REWARDS[name]
    assert 0.93 <= coverage(lambda rng: mean(draw(rng, n).tolist()), truth, 10_000) <= 0.97


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("estimate", "truth"), [(of_tasks, 0.5), (of_two_seats, 0.3)])
def test_intervals_of_tasks_and_of_seats_cover_the_truth(
    estimate: Callable[[np.random.Generator], Estimate], truth: float
) -> None:
    assert 0.93 <= coverage(estimate, truth, 10_000) <= 0.97


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", [12, 16, 40])
@pytest.mark.parametrize("draw", [binary(0.5), REWARDS["scores"][0]], ids=["success", "scores"])
def test_the_paired_test_rejects_as_often_as_it_says(n: int, draw: Draw) -> None:
    rng = np.random.default_rng(5)
    found = [paired(rng, n, draw) for _ in range(4000)]
    rejected = float(np.mean([c.p_value < 0.05 for c in found]))
    covered = float(np.mean([c.difference.low <= 0 <= c.difference.high for c in found]))
    print(f"rejects {rejected:.1%}, and the interval covers {covered:.1%}")
    assert 0.03 <= rejected <= 0.07
    assert 0.93 <= covered <= 0.97
