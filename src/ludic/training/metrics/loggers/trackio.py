"""Metrics for trackio."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from ludic.errors import MissingExtraError


class TrackioLogger:
    """Logs to a trackio run: project `TRACKIO_PROJECT`, else `Ludic`. Opened at the first metrics.

    trackio keeps what it gets on this machine; `trackio show` opens it.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        try:
            import trackio
        except ImportError as exc:
            raise MissingExtraError("trackio", "trackio") from exc
        self._trackio: Any = trackio
        self.project = project or os.environ.get("TRACKIO_PROJECT") or "Ludic"
        self._settings = {"name": name, "config": dict(config or {}), **settings}
        self._run: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the metrics of one step; numbers that are not finite are left out."""
        if self._run is None:
            self._run = self._trackio.init(project=self.project, **self._settings)
        self._run.log({k: v for k, v in metrics.items() if math.isfinite(v)}, step=step)

    def close(self) -> None:
        """Ends the trackio run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
