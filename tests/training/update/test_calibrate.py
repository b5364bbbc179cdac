"""The search for the largest budget; the measuring itself needs a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import ConfigError, OutOfMemoryError
from ludic.inference.tiny import tiny_model
from ludic.training.algorithms.reinforce import ReinforceLoss
from ludic.training.update.calibrate import (
    ROUND,
    calibrate,
    largest_that_fits,
    synthetic_batch,
    trainer_limit,
)


@given(
    fixed=st.integers(0, 1000),
    slope=st.floats(0.01, 3.0),
    bend=st.floats(0.0, 1e-4),
    limit=st.integers(3000, 200_000),
    fails=st.integers(2048, 10**6),
)
def test_the_answer_fits_and_one_step_more_does_not(
    fixed: int, slope: float, bend: float, limit: int, fails: int
) -> None:
    tries: list[int] = []

    def peak(size: int) -> int | None:
        tries.append(size)
        return None if size > fails else int(fixed + slope * size + bend * size * size)

    def fits(size: int) -> bool:
        used = peak(size)
        return used is not None and used <= limit

    if not fits(512):
        with pytest.raises(OutOfMemoryError, match="gradient_checkpointing"):
            largest_that_fits(peak, limit=limit, smallest=512, largest=2**20)
        return
    tries.clear()
    size, used = largest_that_fits(peak, limit=limit, smallest=512, largest=2**20)
    assert len(tries) < 40
    assert used <= limit
    assert fits(size)
    assert not fits(size + ROUND) or size + ROUND > 2**20


def test_without_a_gpu_the_user_is_told_to_choose() -> None:
    with pytest.raises(ConfigError, match="choose micro_token_budget by hand"):
        calibrate(tiny_model(), ReinforceLoss())


def test_a_synthetic_batch_fills_the_budget_of_every_rank() -> None:
    batch = synthetic_batch(1000, 300, 0.25, 50, ranks=2)
    assert sum(len(i.input_ids) for i in batch.items) == 2000
    assert max(len(i.input_ids) for i in batch.items) == 300
    assert batch.counts.tokens == 500


def test_what_others_take_is_not_the_trainers() -> None:
    assert trainer_limit(1000, 0.1, 0) == 900
    assert trainer_limit(1000, 0.1, 300) == 600
    with pytest.raises(OutOfMemoryError, match=r"sampling alone takes.*inference.slots"):
        trainer_limit(1000, 0.1, 900)
