"""`ludic calibrate`: how many tokens of a run fit into one forward and backward pass."""

from __future__ import annotations

from ludic.cli.arguments import Overrides, RunFile


def calibrate(run: RunFile, overrides: Overrides = None) -> None:
    """Find the largest training.micro_token_budget that fits this machine."""
    from ludic.runs.calibration import calibrate_run
    from ludic.runs.results.terminal import say

    calibration, gib = calibrate_run(run, overrides or []), 2**30
    found, share = calibration.found, calibration.gpu_memory
    sampling = (
        f", and sampling takes {found.reserved_bytes / gib:.1f}" if found.reserved_bytes else ""
    )
    say(
        f"training.micro_token_budget={found.micro_token_budget}"
        + (f" inference.vllm.gpu_memory={share}" if share is not None else "")
        + f": the peak is {found.peak_bytes / gib:.1f} of {found.total_bytes / gib:.1f} GiB"
        + sampling
    )
