"""TRL's losses as a second opinion; needs `pip install --no-deps 'trl==1.16.*'`."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

# TRL picks SAPO's temperatures and the std's correction in float32 whatever its inputs are.
FLOAT32 = 1e-6


@pytest.fixture(scope="module", autouse=True)
def trl() -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps 'trl==1.16.*'")


def test_the_losses_that_both_have_agree_in_value_and_gradient() -> None:
    from benchmarks.trl_losses import SAME, compare

    for name, gap in compare(SAME, seeds=5).items():
        assert max(gap.values()) < (FLOAT32 if name == "sapo" else 1e-12), name


def test_accumulated_micro_batches_of_equal_size_agree_with_the_whole() -> None:
    from benchmarks.trl_losses import compare_accumulated

    for name, worst in compare_accumulated(seeds=5).items():
        assert worst < (FLOAT32 if name == "sapo" else 1e-12), name


def test_what_differs_by_choice_differs_in_the_gradient() -> None:
    from benchmarks.trl_losses import DIFFERENT, compare

    for name, gap in compare(DIFFERENT, seeds=5).items():
        assert gap["gradient"] > 1e-5, name


def test_advantages_agree() -> None:
    from benchmarks.trl_losses import compare_advantages

    assert compare_advantages(seeds=5) < FLOAT32
