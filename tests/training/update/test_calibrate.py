"""The search for the largest budget; the measuring itself needs a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import ConfigError, OutOfMemoryError
from ludic.inference.tiny import tiny_model
from ludic.sharding.world import World
from ludic.training.algorithms.reinforce import ReinforceLoss
from ludic.training.config import TrainerConfig
from ludic.training.update.calibrate import (
    ROUND,
    calibrate,
    largest_that_fits,
    synthetic_batch,
    trainer_limit,
    update_fits,
)
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy


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


def test_a_synthetic_batch_fills_the_budget() -> None:
    batch = synthetic_batch(1000, 300, 0.25, 50)
    assert sum(len(i.input_ids) for i in batch.items) == 1000
    assert max(len(i.input_ids) for i in batch.items) == 300
    assert batch.counts.tokens == 250


def test_what_others_take_is_not_the_trainers() -> None:
    assert trainer_limit(1000, 0.1, 0) == 900
    assert trainer_limit(1000, 0.1, 300) == 600
    with pytest.raises(OutOfMemoryError, match=r"sampling alone takes.*inference.slots"):
        trainer_limit(1000, 0.1, 900)


def test_a_step_that_runs_out_of_memory_is_a_try_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, loss = tiny_model(), ReinforceLoss()
    cfg = TrainerConfig(micro_token_budget=64, max_seq_len=32)
    passes = Passes(Policy(model), loss, cfg, World(device=torch.device("cpu")), Cost())
    optimizer = MasterAdamW(model.named_parameters(), cfg)
    batch = synthetic_batch(64, 32, 0.5, 200)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def half_a_step() -> None:
        first = next(iter(optimizer.masters.values()))
        optimizer._adam.state[first]["step"] = torch.tensor(1.0)  # and no room for its moments
        raise torch.OutOfMemoryError("no memory for moments")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._adam, "step", half_a_step)
        assert not update_fits(passes, batch, optimizer)
    assert not optimizer.gradients()
    assert update_fits(passes, batch, optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
