"""Where metrics go. JSONL always; the others are added, and none can stop the run."""

from __future__ import annotations

from ludic.training.metrics.loggers.base import Logger, MetricLog
from ludic.training.metrics.loggers.console import ConsoleLogger
from ludic.training.metrics.loggers.jsonl import JSONLLogger
from ludic.training.metrics.loggers.rich_live import RichLiveLogger
from ludic.training.metrics.loggers.tensorboard import TensorBoardLogger
from ludic.training.metrics.loggers.trackers import TrackioLogger, WandbLogger

__all__ = [
    "ConsoleLogger",
    "JSONLLogger",
    "Logger",
    "MetricLog",
    "RichLiveLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
]
