"""The contract of a logger, and the log that a trainer writes to."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ludic.saw.codec import batch_to_dict
from ludic.saw.items import SAWBatch
from ludic.training.metrics.loggers.jsonl import JSONLLogger

_log = logging.getLogger("ludic.training")
MAX_FAILURES = 3


class Logger(Protocol):
    """Takes metrics under the prefixes `train/`, `eval/` and `perf/`.

    `train/step` and `eval/step` are the axes of their panels. A logger may raise: that is
    a warning, and after a few of them it is left out; the run goes on.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Is called after each update with its metrics and its number in its stage, and with those
        of each evaluation: by position, in this order, on the trainer's event loop."""
        ...

    def close(self) -> None:
        """Is called once, when nothing more will come."""
        ...


class MetricLog:
    """Gives metrics to every logger, and always to `metrics.jsonl` in the run's folder.

    Without `run_dir` the folder is `runs/<name>-<time>`. Where `writes` is false (ranks other
    than 0) nothing is written.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        run_dir: str | Path | None,
        name: str,
        *,
        writes: bool = True,
    ) -> None:
        if run_dir is None:
            run_dir = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.folder, self.writes = Path(run_dir), writes
        self.jsonl = JSONLLogger(self.folder / "metrics.jsonl")
        self._loggers: list[Logger] = [self.jsonl, *loggers] if writes else []
        self._failures: dict[int, int] = {}

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        """One line of metrics for every logger."""
        for logger in list(self._loggers):
            self._try(logger, lambda logger=logger: logger.log(metrics, step))  # type: ignore[misc]

    def write_samples(self, name: str, batch: SAWBatch) -> Path:
        """The batch as JSON beside the metrics, for looking at what went wrong."""
        path = self.folder / "samples" / f"{name}.json"
        if self.writes:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(batch_to_dict(batch), default=repr), encoding="utf-8")
            except OSError as exc:
                _log.warning("could not write the samples to %s: %s", path, exc)
        return path

    def rewind(self, step: int) -> None:
        """After a resume: forgets lines of steps that will be taken again."""
        if self.writes:
            self._try(self.jsonl, lambda: self._rewind(step))

    def _rewind(self, step: int) -> None:
        if missing := self.jsonl.rewind(step):
            _log.warning(
                "%s has no line for %d of the %d steps that the checkpoint has: it was cut or "
                "damaged, and curves have gaps there; the training itself is whole",
                *(self.jsonl.path, missing, step),
            )

    def begin(self) -> None:
        """For a run that starts at its first step: lines that are there are kept elsewhere."""
        if self.writes:
            self._try(self.jsonl, self._set_lines_aside)

    def _set_lines_aside(self) -> None:
        kept = self.jsonl.set_aside()
        if kept is not None:
            _log.warning(
                "%s had lines of a run without a checkpoint: they are in %s now",
                self.jsonl.path,
                kept.name,
            )

    def close(self) -> None:
        """Closes every logger."""
        for logger in list(self._loggers):
            self._try(logger, logger.close)

    def _try(self, logger: Logger, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:
            count = self._failures[id(logger)] = self._failures.get(id(logger), 0) + 1
            name = type(logger).__name__
            _log.warning("%s failed: %s: %s; the run goes on", name, type(exc).__name__, exc)
            if count >= MAX_FAILURES and logger in self._loggers:
                self._loggers.remove(logger)
                _log.warning("%s failed %d times and is left out from now on", name, count)
