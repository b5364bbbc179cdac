"""Metrics as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path


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
        kept, steps = [], set[float]()
        for line in self.path.read_text("utf-8", "replace").splitlines():
            try:
                row = json.loads(line)
                if row["step"] > step:
                    continue
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            kept.append(line + "\n")
            if "train/step" in row:
                steps.add(row["train/step"])
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())  # or a machine that dies now has an empty file
        os.replace(temporary, self.path)
        return step - len(steps)

    def set_aside(self) -> Path | None:
        """Renames the file and returns its new name; None where there is no file."""
        if not self.path.exists():
            return None
        kept, number = self.path.with_name(f"superseded-{self.path.name}"), 2
        while kept.exists():
            kept = self.path.with_name(f"superseded-{number}-{self.path.name}")
            number += 1
        os.replace(self.path, kept)
        return kept

    def close(self) -> None:
        """Nothing is held open."""
