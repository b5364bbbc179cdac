"""The learning rate as a function of the step: nothing to save but the step itself."""

from __future__ import annotations

import math

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
