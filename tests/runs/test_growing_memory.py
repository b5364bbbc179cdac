"""Who lets torch's allocator grow its blocks: runs whose engine is in the trainer's process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.runs import model
from ludic.runs.settings import check_run

TABLES: dict[str, Any] = {
    "model": {"name": "tiny"},
    "env": {"kind": "tic_tac_toe"},
    "algorithm": {"name": "reinforce"},
    "training": {"steps": 1},
}


def settings_of_a_run(monkeypatch: pytest.MonkeyPatch, device: str, **inference: Any) -> list[str]:
    """What building the run's model tells the allocator."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(model, "check_device", lambda section: torch.device(device))
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *args, **kwargs: module)
    config = check_run(TABLES | {"inference": inference})
    model.build_model(config)
    return told


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_an_engine_in_the_process_shares_memory_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of_a_run(monkeypatch, "cuda") == ["expandable_segments:True"]


def test_weights_for_a_server_stay_in_blocks_that_can_be_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings_of_a_run(monkeypatch, "cuda", backend="vllm") == []


def test_a_cpu_and_a_users_own_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of_a_run(monkeypatch, "cpu") == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert settings_of_a_run(monkeypatch, "cuda") == []


def test_a_model_inside_another_run_leaves_the_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(model, "check_device", lambda section: torch.device("cuda"))
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *args, **kwargs: module)
    model.build_model(check_run(TABLES), inside=True)
    assert told == []
