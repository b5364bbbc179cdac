"""An update of a run, as its callbacks and its loggers hear of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ludic.registry import LOGGERS
from ludic.runs.episodes import requests_of
from ludic.runs.results.terminal import console
from ludic.runs.settings import RunConfig
from ludic.runs.settings.base import configuring
from ludic.runs.storage.folder import RunFolder
from ludic.training.metrics.loggers import Logger

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
    of_this_run: dict[str, dict[str, Any]] = {
        "live": {"keys": keys, "total_steps": steps, "console": console},
        "console": {"keys": keys, "every": max(steps // 10, 1)},
        "trackio": {"name": folder.path.name},
        "tensorboard": {"folder": folder.path / "tensorboard"},
    }
    loggers: list[Logger] = []
    for entry in config.logging.loggers:
        options = {"kind": entry} if isinstance(entry, str) else dict(entry)
        if options.get("kind") == "live" and not console.is_terminal:
            options = {"kind": "console"}
        with configuring(f"logging.loggers: {entry!r}"):
            usual = of_this_run.get(str(options.get("kind")), {})
            loggers.append(LOGGERS.make_from({**usual, **options}))
    return loggers


class LastingLogger:
    """Stands for a logger that hears all stages of a run, which closes it at the end."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log(metrics, step)

    def close(self) -> None:
        """Another stage may come."""
