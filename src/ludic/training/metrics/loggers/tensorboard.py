"""Metrics for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludic.errors import MissingExtraError


class TensorBoardLogger:
    """Writes scalars to an event file in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as exc:
            raise MissingExtraError("tensorboard", "tensorboard") from exc
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is buffered."""
        self._writer.close()
