"""Where metrics go. JSONL always; the others are added, and none can stop the run."""

from __future__ import annotations

from ludic.training.loggers.base import Logger, MetricLog
from ludic.training.loggers.console import ConsoleLogger
from ludic.training.loggers.jsonl import JSONLLogger
from ludic.training.loggers.rich_live import RichLiveLogger
from ludic.training.loggers.tensorboard import TensorBoardLogger
from ludic.training.loggers.wandb import WandbLogger

__all__ = [
    "ConsoleLogger",
    "JSONLLogger",
    "Logger",
    "MetricLog",
    "RichLiveLogger",
    "TensorBoardLogger",
    "WandbLogger",
]
