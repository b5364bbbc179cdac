"""How many tokens of a run fit into one forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ludic.runs.assemble import algorithm_of
from ludic.runs.locate import locate
from ludic.runs.model import build_model, precision_of
from ludic.runs.settings import RunConfig
from ludic.training import TrainerConfig
from ludic.training.update.calibrate import Calibration, calibrate


def calibrate_run(run: str, overrides: Sequence[str] = ()) -> Calibration:
    """Measures real updates of the run's model without changing its weights. If the run samples
    in this process, the budget leaves room for its engines. Needs a GPU."""
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
    loss = algorithm_of(config).loss
    return calibrate(model, loss, settings, reserved_bytes=sampling_bytes(config, model))


def sampling_bytes(config: RunConfig, model: nn.Module, device: torch.device | None = None) -> int:
    """What sampling takes of the trainer's device: the in-process engine, and for each past
    opponent another one with a copy of the model. Engines elsewhere take nothing."""
    if config.inference.backend != "local":
        return 0
    from ludic.inference.local.gpu.engine_memory import engine_memory

    engine = engine_memory(
        model,
        max_slots=config.inference.slots,
        max_context_tokens=config.inference.max_context_tokens,
        deterministic=config.inference.deterministic,
        device=device,
    ).total
    copies = config.training.past_opponents
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return engine + copies * (engine + weights)
