"""The budget that a trainer takes if nobody says one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.inference.tiny import tiny_model
from ludic.sharding.world import World
from ludic.training.config import TrainerConfig
from ludic.training.update.planning import MOST, USUAL, activation_bytes, default_budget

SMOLLM2 = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}


@pytest.mark.parametrize(
    ("item", "mixed", "measured"), [(2, False, 727_000), (4, True, 901_000), (4, False, 1_480_000)]
)
def test_the_estimate_is_near_what_smollm2_took_on_a_gpu(
    item: int, mixed: bool, measured: int
) -> None:
    found = activation_bytes(SMOLLM2, item, mixed=mixed)
    assert found == pytest.approx(measured, rel=0.25)


def test_a_model_that_does_not_say_its_size_has_no_estimate() -> None:
    assert activation_bytes({**SMOLLM2, "intermediate_size": [1, 2]}, 2, mixed=False) is None


def test_a_cpu_and_several_ranks_take_the_usual_budget_or_the_longest_sample() -> None:
    model = tiny_model()
    cpu = World(device=torch.device("cpu"))
    assert default_budget(model, TrainerConfig(), cpu) == USUAL
    assert default_budget(model, TrainerConfig(max_seq_len=20_000), cpu) == 20_000


@pytest.mark.parametrize(("free", "budget"), [(1 << 20, USUAL), (1 << 50, MOST)])
def test_a_gpu_takes_what_fits_between_the_usual_and_the_most(
    monkeypatch: pytest.MonkeyPatch, free: int, budget: int
) -> None:
    def memory(device: Any) -> tuple[int, int]:
        return free, free

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    gpu = World(device=torch.device("cuda"))
    assert default_budget(tiny_model(), TrainerConfig(), gpu) == budget
