"""Metrics for Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ludic.errors import MissingExtraError


class WandbLogger:
    """Logs to a W&B run: project `WANDB_PROJECT`, else `Ludic`. Opened at the first metrics."""

    def __init__(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        try:
            import wandb
        except ImportError as exc:
            raise MissingExtraError("wandb", "wandb") from exc
        self._wandb: Any = wandb
        self.project = project or os.environ.get("WANDB_PROJECT") or "Ludic"
        self._settings = {"name": name, "config": dict(config or {}), **settings}
        self._run: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the metrics; `train/step` and `eval/step` are the axes of their panels."""
        if self._run is None:
            self._run = self._wandb.init(project=self.project, **self._settings)
            for prefix, axis in (("train", "train"), ("perf", "train"), ("eval", "eval")):
                self._run.define_metric(f"{prefix}/*", step_metric=f"{axis}/step")
        self._run.log(dict(metrics))

    def close(self) -> None:
        """Ends the W&B run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
