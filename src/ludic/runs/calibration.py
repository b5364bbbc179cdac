"""How many tokens of a run fit into one forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludic.runs.assemble import algorithm_of
from ludic.runs.gpu_share import sampling_bytes, server_shares_gpu, trainer_settings
from ludic.runs.locate import locate
from ludic.runs.model import build_model
from ludic.training.update.calibrate import Calibration, calibrate


@dataclass(frozen=True, slots=True)
class RunCalibration:
    """What was found for a run; `gpu_memory` is the share to state for the vLLM server that it
    starts on the same GPU, if it does."""

    found: Calibration
    gpu_memory: float | None = None


def calibrate_run(run: str, overrides: Sequence[str] = ()) -> RunCalibration:
    """Measures real updates of the run's model without changing its weights. The budget leaves room
    for what samples on the same GPU: the engines in this process, or the vLLM server that the run
    starts. Needs a GPU."""
    config, weights = locate(run, overrides)
    model, _ = build_model(config, weights)
    loss = algorithm_of(config).loss
    reserved = sampling_bytes(config, model)
    found = calibrate(model, loss, trainer_settings(config), reserved_bytes=reserved)
    beside = server_shares_gpu(config, next(model.parameters()).device)
    return RunCalibration(found, round(reserved / found.total_bytes, 4) if beside else None)
