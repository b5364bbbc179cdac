"""How many tokens of a run fit into one forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from ludic.runs.assemble import algorithm_of
from ludic.runs.locate import locate
from ludic.runs.model import build_model, precision_of
from ludic.training import TrainerConfig
from ludic.training.update.calibrate import Calibration, calibrate


def calibrate_run(run: str, overrides: Sequence[str] = ()) -> Calibration:
    """Measures real updates of the run's model without changing its weights. Needs a GPU."""
    config, weights = locate(run, overrides)
    model, _ = build_model(config, weights)
    training = config.training
    settings = TrainerConfig(
        max_seq_len=training.max_seq_len,
        micro_token_budget=training.micro_token_budget,
        gradient_checkpointing=training.gradient_checkpointing,
        compile=training.compile,
        head_kernels=training.head_kernels,
        precision=precision_of(config),
    )
    return calibrate(model, algorithm_of(config).loss, settings)
