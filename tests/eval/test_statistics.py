"""Intervals cover, pass@k is unbiased, and the paired test holds its level."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.eval.statistics import compare_paired, mean, pass_at_k, proportion


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
    # Six pairs, all differences +1: 2 of 64 sign patterns are as extreme.
    assert compare_paired([0.0] * 6, [1.0] * 6).p_value == pytest.approx(2 / 64)


def test_a_paired_test_keeps_its_level_under_exchangeability() -> None:
    rng = np.random.default_rng(3)
    rejected = 0
    for seed in range(200):
        x, y = rng.integers(0, 2, (2, 60)).astype(float)
        rejected += compare_paired(x.tolist(), y.tolist(), seed=seed).p_value < 0.05
    assert rejected / 200 <= 0.09
