"""An update of a run, as its callbacks and its loggers hear of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ludic.runs.results.terminal import console
from ludic.runs.settings import RunConfig
from ludic.runs.storage.folder import RunFolder
from ludic.training.metrics.loggers import (
    ConsoleLogger,
    Logger,
    RichLiveLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)

Stage = Literal["sft", "rl"]
SHOWN = {
    "sft": ("train/nll", "perf/tokens_per_s"),
    "rl": ("train/reward_mean", "train/loss", "train/entropy", "perf/tokens_per_s"),
}


@dataclass(frozen=True, slots=True)
class Update:
    """One update of a run: its stage, its number in that stage, and its metrics."""

    stage: Stage
    step: int
    metrics: Mapping[str, float]


def make_loggers(config: RunConfig, folder: RunFolder, stage: Stage) -> list[Logger]:
    """Returns the loggers that a stage of the run names, besides `metrics.jsonl`."""
    keys = SHOWN[stage]
    steps = config.sft.steps if stage == "sft" and config.sft else config.training.steps
    loggers: list[Logger] = []
    for name in config.logging.loggers:
        if name == "live" and console.is_terminal:
            loggers.append(RichLiveLogger(keys, total_steps=steps, console=console))
        elif name in ("live", "console"):
            loggers.append(ConsoleLogger(keys, every=max(steps // 10, 1)))
        elif name == "wandb":
            loggers.append(WandbLogger())
        elif name == "trackio":
            loggers.append(TrackioLogger(name=folder.path.name))
        else:
            loggers.append(TensorBoardLogger(folder.path / "tensorboard"))
    return loggers
