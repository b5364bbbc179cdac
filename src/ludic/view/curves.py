"""A run's metrics as curves: read once, followed as they grow, thinned out for a picture."""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ludic.view.folders import RunPlace, ViewError

_READ = 1 << 20
_MOST_POINTS = 4_000_000
_LONGEST_LINE = 4 << 20
STAGES = {"": "metrics.jsonl", "sft:": "sft/metrics.jsonl"}
"""The prefix of a stage's keys, and its file."""


@dataclass(slots=True)
class _Curves:
    """One file. Points are (step, value); the columns are arrays, so a point takes 16 bytes."""

    path: Path
    offset: int = 0
    inode: int = -1
    bad: int = 0
    cut: bool = False
    """Whether the last line has no end, as while it is being written."""
    points: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def follow(self) -> None:
        """Reads the whole lines that were added; starts again if the file was rewritten."""
        try:
            now = self.path.stat()
        except OSError:
            return
        if now.st_ino != self.inode or now.st_size < self.offset:
            self.offset, self.inode, self.bad = 0, now.st_ino, 0
            self.points, self.last, self.cut = {}, {}, False
        if now.st_size == self.offset:
            self.cut = False
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            rest = b""
            while data := file.read(_READ):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.offset += len(line) + 1
                    self._take(line)
                self.cut = bool(rest)
                if len(rest) > _LONGEST_LINE:
                    return

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            row = json.loads(line)
            step = float(row.get("train/step", row.get("eval/step", row["step"])))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.bad += 1
            return
        for key, value in row.items():
            if key == "step" or not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            steps, values = self.points.setdefault(key, (array("d"), array("d")))
            steps.append(step)
            values.append(value)
            self.last[key] = float(value)


class CurveStore:
    """The curves of the runs that were looked at last. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, _Curves] = OrderedDict()

    def keys(self, run: RunPlace) -> list[str]:
        """The names of a run's metrics, sorted."""
        with self._lock:
            return sorted(p + key for p in STAGES for key in self._of(run, p).last)

    def progress(self, run: RunPlace) -> dict[str, Any]:
        """How many lines could not be read, whether the last one is cut, how many steps have no
        line, and each metric's last value."""
        with self._lock:
            curves = self._of(run, "")
            steps = curves.points.get("train/step", (array("d"), array("d")))[1]
            return {
                "bad": curves.bad,
                "cut": curves.cut,
                "gaps": int(max(steps) - min(steps)) + 1 - len(set(steps)) if steps else 0,
                "last": dict(curves.last),
            }

    def curve(
        self,
        run: RunPlace,
        key: str,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        most: int = 400,
    ) -> list[list[float]]:
        """Points (step, mean, smallest, largest) between two steps: each of them where they are
        few, else one for every stretch of them."""
        prefix = next((p for p in STAGES if p and key.startswith(p)), "")
        with self._lock:
            steps, values = self._of(run, prefix).points.get(
                key.removeprefix(prefix), (array("d"), array("d"))
            )
            chosen = [(s, v) for s, v in zip(steps, values, strict=True) if low <= s <= high]
        chosen.sort(key=lambda point: point[0])  # cheap: nearly always they are in order
        return thinned([s for s, _ in chosen], [v for _, v in chosen], most)

    def _of(self, run: RunPlace, prefix: str) -> _Curves:
        path = run.path / STAGES[prefix]
        try:
            path = run.confined(path)
        except ViewError:
            return _Curves(path)
        if not path.is_file():
            return _Curves(path)
        curves = self._files.setdefault(path, _Curves(path))
        self._files.move_to_end(path)
        curves.follow()
        held = sum(len(s) for c in self._files.values() for s, _ in c.points.values())
        while held > _MOST_POINTS and len(self._files) > 1:
            _, dropped = self._files.popitem(last=False)
            held -= sum(len(s) for s, _ in dropped.points.values())
        return curves


def thinned(steps: Sequence[float], values: Sequence[float], most: int) -> list[list[float]]:
    """At most `most` points, each the mean of a stretch with its smallest and largest value."""
    parts = max(min(len(steps), most), 1)
    ends = [number * len(steps) // parts for number in range(1, parts)]
    return [
        [float(at[-1]), float(part.mean()), float(part.min()), float(part.max())]
        for at, part in zip(np.split(steps, ends), np.split(values, ends), strict=True)
        if part.size
    ]
