"""The trainer's settings: what they are where nothing is said, and which are refused."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from ludic.errors import ConfigError
from ludic.training import CheckpointConfig, TrainerConfig


def test_what_is_not_set_has_the_defaults_that_are_documented() -> None:
    assert asdict(TrainerConfig()) == {
        "learning_rate": 1e-5,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "schedule": "constant",
        "warmup_steps": 0,
        "total_steps": None,
        "final_lr_ratio": 0.0,
        "optimizer_device": None,
        "max_seq_len": 2048,
        "micro_token_budget": None,
        "epochs": 1,
        "mini_batches": 1,
        "overlap": False,
        "max_lag": 1,
        "precision": None,
        "attention": "auto",
        "gradient_checkpointing": None,
        "keep_logits": None,
        "compile": False,
        "head_kernels": "auto",
        "fused_layers": True,
        "graphs": True,
        "max_nonfinite_steps": 3,
        "batch_timeout_s": 3600.0,
        "publish_timeout_s": 600.0,
        "seed": 0,
        "checkpoint": None,
        "run_dir": None,
        "eval_every": None,
    }
    assert asdict(CheckpointConfig("folder")) == {
        "folder": "folder",
        "every": 50,
        "keep": 2,
        "background": False,
        "resume": True,
        "resumable": True,
        "write_timeout_s": 1800.0,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"micro_token_budget": 2047}, "micro_token_budget=2047 is below max_seq_len"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": math.inf}, "learning_rate=inf: must be finite"),
        ({"weight_decay": math.inf}, "weight_decay=inf: must be finite"),
        ({"weight_decay": -1e-9}, "weight_decay"),
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan: must be finite"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"eps": math.nan}, "eps=nan: must be finite"),
        ({"eps": -1e-9}, "eps"),
        ({"final_lr_ratio": math.nan}, "final_lr_ratio"),
        ({"final_lr_ratio": -1e-9}, "final_lr_ratio"),
        ({"final_lr_ratio": 1.001}, "final_lr_ratio"),
        ({"betas": (0.9, math.nan)}, "betas"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"batch_timeout_s": math.inf}, "batch_timeout_s=inf: must be finite"),
        ({"batch_timeout_s": 0.0}, "batch_timeout_s"),
        ({"publish_timeout_s": 0.0}, "publish_timeout_s"),
        ({"schedule": "square"}, "schedule='square': must be one of"),
        ({"attention": "flex"}, "attention='flex': must be one of"),
        ({"schedule": "cosine"}, "total_steps"),
        ({"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "warmup_steps"),
        ({"total_steps": 0}, "warmup_steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"max_seq_len": 1}, "max_seq_len"),
        ({"epochs": 0}, "epochs"),
        ({"mini_batches": 0}, "mini_batches"),
        ({"max_lag": -1}, "max_lag"),
        ({"overlap": True, "max_lag": 0}, "overlap=True"),
        ({"max_nonfinite_steps": -1}, "max_nonfinite_steps"),
        ({"eval_every": 0}, "eval_every"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainerConfig(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_token_budget": 2048},
        {"weight_decay": 0.0, "eps": 0.0, "betas": (0.0, 0.0)},
        {"max_grad_norm": None},
        {"max_grad_norm": math.inf},
        {"max_grad_norm": 1e-9, "learning_rate": 1e-9},
        {"final_lr_ratio": 0.0},
        {"final_lr_ratio": 1.0},
        {"batch_timeout_s": 0.5, "publish_timeout_s": 0.5},
        {"schedule": "linear", "total_steps": 6, "warmup_steps": 5},
        {"total_steps": 1},
        {"max_seq_len": 2},
        {"max_lag": 0},
        {"overlap": True, "max_lag": 1},
        {"overlap": True, "max_lag": None},
        {"max_nonfinite_steps": 0},
        {"eval_every": 1},
    ],
)
def test_settings_at_the_end_of_what_can_work_are_not(changes: dict[str, Any]) -> None:
    made = TrainerConfig(**changes)
    assert {name: getattr(made, name) for name in changes} == changes


def test_a_checkpoint_is_written_and_kept_at_least_once_and_waited_for() -> None:
    CheckpointConfig("folder", every=1, keep=1, write_timeout_s=0.5)
    for changes in ({"every": 0}, {"keep": 0}, {"write_timeout_s": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            CheckpointConfig("folder", **changes)


def test_a_batch_gives_an_optimizer_step_for_each_mini_batch_of_each_epoch() -> None:
    assert TrainerConfig(epochs=2, mini_batches=3).updates_per_batch == 6
