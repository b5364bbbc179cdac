"""An update of a run, as its callbacks and its loggers hear of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ludic.runs.requests import requests_of
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


def shown_metrics(config: RunConfig, stage: Stage) -> tuple[str, ...]:
    """Returns the metrics that a terminal shows while a stage is under way."""
    if stage == "sft":
        return SHOWN[stage]
    keys = list(SHOWN[stage])
    if config.eval.outcomes:
        keys.insert(0, f"train/outcome/{config.eval.outcomes[0]}")
    if config.curriculum.kind == "stages":
        keys.append("train/curriculum_stage")
    names = requests_of(config)
    return (*keys, *(f"train/env/{name}/reward_mean" for name in names if len(names) > 1))


def make_loggers(config: RunConfig, folder: RunFolder, stage: Stage) -> list[Logger]:
    """Returns the loggers that a stage of the run names, besides `metrics.jsonl`."""
    keys = shown_metrics(config, stage)
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
