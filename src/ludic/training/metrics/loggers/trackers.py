"""Metrics for experiment trackers: Weights & Biases, trackio."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from ludic.errors import MissingExtraError


class _Tracker:
    """A run of a project in a tracker, opened at the first metrics."""

    package: ClassVar[str]

    def __init__(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        try:
            self._package: Any = import_module(self.package)
        except ImportError as exc:
            raise MissingExtraError(self.package, self.package) from exc
        self.project = project or os.environ.get(f"{self.package.upper()}_PROJECT") or "Ludic"
        self._settings = {"name": name, "config": dict(config or {}), **settings}
        self._run: Any = None

    def _opened(self) -> Any:
        if self._run is None:
            self._run = self._package.init(project=self.project, **self._settings)
            self._begin()
        return self._run

    def _begin(self) -> None:
        """Prepares a run that was just opened."""

    def close(self) -> None:
        """Ends the tracker's run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class WandbLogger(_Tracker):
    """Logs to a W&B run: project `WANDB_PROJECT`, else `Ludic`. Opened at the first metrics."""

    package = "wandb"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the metrics; `train/step` and `eval/step` are the axes of their panels."""
        self._opened().log(dict(metrics))

    def _begin(self) -> None:
        for prefix, axis in (("train", "train"), ("perf", "train"), ("eval", "eval")):
            self._run.define_metric(f"{prefix}/*", step_metric=f"{axis}/step")


class TrackioLogger(_Tracker):
    """Logs to a trackio run: project `TRACKIO_PROJECT`, else `Ludic`. Opened at the first metrics.

    trackio keeps what it gets on this machine; `trackio show` opens it.
    """

    package = "trackio"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the metrics of one step; numbers that are not finite are left out."""
        self._opened().log({k: v for k, v in metrics.items() if math.isfinite(v)}, step=step)
