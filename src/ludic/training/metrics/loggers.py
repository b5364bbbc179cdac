"""Where metrics go: the contract of a logger, the built-in ones, and the trainer's log, which
keeps a failing logger from stopping the run."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

from ludic.errors import MissingExtraError
from ludic.plumbing.files import replacing
from ludic.saw.codec import batch_to_dict
from ludic.saw.items import SAWBatch


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


class JSONLLogger:
    """One line per call, written through at once. Numbers that are not finite become null."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends a line. It begins with the step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = {"step": step, **{k: v if math.isfinite(v) else None for k, v in metrics.items()}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def rewind(self, step: int) -> int:
        """Drops lines after `step`, and those that cannot be read: one that was cut short when the
        process died, or damage. Returns how many of the steps up to there have no line; where there
        is no file, none is missed."""
        if not self.path.exists():
            return 0
        lines, steps = [], set[float]()
        for line in self.path.read_text("utf-8", "replace").splitlines():
            try:
                row = json.loads(line)
                if row["step"] > step:
                    continue
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            lines.append(line + "\n")
            if "train/step" in row:
                steps.add(row["train/step"])
        with replacing(self.path, durable=True) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
        return step - len(steps)

    def set_aside(self) -> Path | None:
        """Renames the file and returns its new name; None where there is no file."""
        if not self.path.exists():
            return None
        renamed, number = self.path.with_name(f"superseded-{self.path.name}"), 2
        while renamed.exists():
            renamed = self.path.with_name(f"superseded-{number}-{self.path.name}")
            number += 1
        os.replace(self.path, renamed)
        return renamed

    def close(self) -> None:
        """Nothing is held open."""


DEFAULT = (
    "train/loss",
    "train/reward_mean",
    "train/grad_norm",
    "train/entropy",
    "train/mismatch_kl",
    "perf/tokens_per_s",
    "perf/step_s",
)


class ConsoleLogger:
    """Prints the chosen metrics every `every` steps, and all of an evaluation's."""

    def __init__(
        self, keys: Sequence[str] = DEFAULT, *, every: int = 1, stream: TextIO | None = None
    ) -> None:
        self.keys, self.every, self.stream = tuple(keys), every, stream

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One line. Metrics that a step does not have are left out."""
        evaluated = "eval/step" in metrics
        if step % self.every and not evaluated:
            return
        keys = [k for k in metrics if k.startswith("eval/")] if evaluated else self.keys
        parts = [f"{_short(k)} {metrics[k]:.4g}" for k in keys if k in metrics and k != "eval/step"]
        kind = "eval" if evaluated else "step"
        print(f"{kind} {step:>6}  " + "  ".join(parts), file=self.stream or sys.stdout, flush=True)

    def close(self) -> None:
        """Nothing is held."""


def _short(key: str) -> str:
    return key.split("/", 1)[1]


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last `width` values as blocks, lowest to highest; gaps where one is not finite."""
    shown = list(values)[-width:]
    finite = list(filter(math.isfinite, shown))
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] if math.isfinite(v) else " " for v in shown)


class RichLiveLogger:
    """Draws the chosen metrics in place on the terminal, with progress towards `total_steps`."""

    def __init__(
        self,
        keys: Sequence[str] = DEFAULT,
        *,
        total_steps: int | None = None,
        history: int = 32,
        console: Any = None,
    ) -> None:
        self.keys, self.total_steps = tuple(keys), total_steps
        self._history: dict[str, deque[float]] = {}
        self._length = history
        self._step = 0
        self._console = console
        self._live: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes the metrics into the history and draws again."""
        self._step = step
        for name, value in metrics.items():
            if name in self.keys or (name.startswith("eval/") and name != "eval/step"):
                self._history.setdefault(name, deque(maxlen=self._length)).append(value)
        if self._live is None:
            from rich.live import Live

            self._live = Live(self.view(), console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self.view(), refresh=True)

    def view(self) -> Any:
        """What is drawn."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        of = f" of {self.total_steps}" if self.total_steps else ""
        table = Table(title=f"step {self._step}{of}", title_justify="left", box=None)
        table.add_column("metric", style="cyan", no_wrap=True)
        table.add_column("now", justify="right")
        table.add_column("course", no_wrap=True)
        if self.total_steps:
            share = f"{100 * self._step / self.total_steps:.0f} %"
            bar = ProgressBar(total=self.total_steps, completed=self._step, width=self._length)
            table.add_row("progress", share, bar)
        for name, values in self._history.items():
            table.add_row(name, f"{values[-1]:.4g}", sparkline(list(values), self._length))
        return table

    def close(self) -> None:
        """Leaves the last picture on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None


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


_log = logging.getLogger("ludic.training")
MAX_FAILURES = 3


_numbers = itertools.count()
"""Tell the folders of trainers apart that one process makes within a second."""


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
            now = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            run_dir = Path("runs") / f"{now}-{next(_numbers)}"
        self.folder, self.writes = Path(run_dir), writes
        self.jsonl = JSONLLogger(self.folder / "metrics.jsonl")
        self._loggers: list[Logger] = [self.jsonl, *loggers] if writes else []
        self._failures: dict[int, int] = {}

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        """One line of metrics for every logger."""
        for logger in list(self._loggers):
            with self._unstopped(logger):
                logger.log(metrics, step)

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
        with self._unstopped(self.jsonl):
            if self.writes and (missing := self.jsonl.rewind(step)):
                _log.warning(
                    "%s has no line for %d of the %d steps that the checkpoint has: it was cut or "
                    "damaged, and curves have gaps there; the training itself is whole",
                    *(self.jsonl.path, missing, step),
                )

    def begin(self) -> None:
        """For a run that starts at its first step: lines that are there are kept elsewhere."""
        with self._unstopped(self.jsonl):
            if self.writes and (renamed := self.jsonl.set_aside()) is not None:
                _log.warning(
                    "%s had lines of a run without a checkpoint: they are in %s now",
                    *(self.jsonl.path, renamed.name),
                )

    def close(self) -> None:
        """Closes every logger."""
        for logger in list(self._loggers):
            with self._unstopped(logger):
                logger.close()

    @contextmanager
    def _unstopped(self, logger: Logger) -> Iterator[None]:
        """Inside, what goes wrong is a warning; a logger that fails too often is left out."""
        try:
            yield
        except Exception as exc:
            count = self._failures[id(logger)] = self._failures.get(id(logger), 0) + 1
            name = type(logger).__name__
            _log.warning("%s failed: %s: %s; the run goes on", name, type(exc).__name__, exc)
            if count >= MAX_FAILURES and logger in self._loggers:
                self._loggers.remove(logger)
                _log.warning("%s failed %d times and is left out from now on", name, count)
