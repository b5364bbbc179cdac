"""Metrics as a line on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

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
