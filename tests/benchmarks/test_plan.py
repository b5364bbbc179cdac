"""The benchmark that judges plans: the shipped profile is the one that it fits."""

from __future__ import annotations

import pytest

from benchmarks.plan import Line, figures, fitted, pass_features, solved
from benchmarks.plan_rows import DECODE, PASSES
from ludic.plan.costs import Costs
from ludic.plan.profile import load_profile


def test_the_shipped_profile_of_the_h200_is_what_the_rows_fit() -> None:
    shipped = load_profile("h200")
    again = fitted(shipped)
    for name, figure in shipped.figures.items():
        assert again[name] == pytest.approx(figure.value, rel=1e-3, abs=1e-20), name


def test_steps_and_passes_that_did_not_fit_it_are_within_15_percent() -> None:
    profile = load_profile("h200")
    for row in DECODE:
        if not row.fits:
            seconds = Costs(profile, row.shape, row.adapter).decode_s(row.rows, 320 * row.rows)
            assert 1000 * seconds == pytest.approx(row.ms, rel=0.15), row.name
    for line in PASSES:
        if not line.fits:
            parts = pass_features(profile, line)
            seconds = sum(profile[name] * size for name, size in parts.items())
            assert seconds == pytest.approx(line.seconds, rel=0.15), line.name


def test_only_judged_rows_count_and_ratios_stand_apart() -> None:
    lines = [
        Line("passes", "a", 1.1, 1.0),
        Line("passes", "b", 3.0, 1.0, "fitted"),
        Line("passes", "c", 0.5, 1.0),
        Line("async : sync", "d", 0.4, 0.5),
    ]
    found = figures(lines)
    assert (found["judged"], found["within_15_percent"], found["worst"]) == (2, 1, -0.5)
    assert found["ratios"] == {"d": [0.4, 0.5]}


def test_a_growing_function_is_solved() -> None:
    assert solved(lambda x: x * x, 9.0, 0.0, 10.0) == pytest.approx(3.0, rel=0.05)
