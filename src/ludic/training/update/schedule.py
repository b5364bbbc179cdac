"""The learning rate as a function of the step and the settings alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ludic.training.config import TrainerConfig


def learning_rate(cfg: TrainerConfig, step: int) -> float:
    """The rate of step `step`, counted from 0: a linear warm-up, then the schedule.

    `linear` and `cosine` fall to `final_lr_ratio` of the peak at `total_steps` and stay there.
    """
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant" or cfg.total_steps is None:
        return cfg.learning_rate
    done = min((step - cfg.warmup_steps) / (cfg.total_steps - cfg.warmup_steps), 1.0)
    left = 1.0 - done if cfg.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return cfg.learning_rate * (cfg.final_lr_ratio + (1.0 - cfg.final_lr_ratio) * left)


def curve(cfg: TrainerConfig) -> dict[str, Any]:
    """The settings that decide the rate, as JSON: saved, to tell whether a resumed run keeps it."""
    settings = ["schedule", "learning_rate", "warmup_steps"]
    if cfg.schedule != "constant":
        settings += ["total_steps", "final_lr_ratio"]
    return {name: getattr(cfg, name) for name in settings}


def describe_change(cfg: TrainerConfig, saved: Mapping[str, Any], step: int) -> str | None:
    """What `cfg` changes in the curve that a run was saved with; None for nothing, or where
    nothing was saved."""
    now = curve(cfg)
    if not saved or now == saved:
        return None
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    changes = ", ".join(f"{name}={now.get(name)} (was {saved.get(name)})" for name in names)
    rate = learning_rate(cfg, step)
    return (
        f"the learning rate follows another curve from step {step} on: {changes}; it is {rate:.3g}"
    )
