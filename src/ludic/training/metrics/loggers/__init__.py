"""Where metrics go. JSONL always; the others are added, and none can stop the run."""

from __future__ import annotations

from ludic.training.metrics.loggers.base import Logger as Logger
from ludic.training.metrics.loggers.base import MetricLog as MetricLog
from ludic.training.metrics.loggers.console import ConsoleLogger as ConsoleLogger
from ludic.training.metrics.loggers.jsonl import JSONLLogger as JSONLLogger
from ludic.training.metrics.loggers.rich_live import RichLiveLogger as RichLiveLogger
from ludic.training.metrics.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from ludic.training.metrics.loggers.trackers import TrackioLogger as TrackioLogger
from ludic.training.metrics.loggers.trackers import WandbLogger as WandbLogger
