"""A live view of the run: progress, and the course of each metric as a sparkline."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.training.metrics.loggers.console import DEFAULT

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last `width` values as blocks, lowest to highest; gaps where one is not finite."""
    shown = list(values)[-width:]
    finite = [v for v in shown if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BLOCKS[round((v - low) * scale)] if v == v and abs(v) != float("inf") else " "
        for v in shown
    )


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
