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

    def rewind(self, step: int) -> None:
        """Drops lines after `step`, and one that was cut short when the process died."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)

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
