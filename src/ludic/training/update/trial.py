"""One pass over the largest micro-batch, before anything depends on it."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ludic.plumbing.model_parts import base_causal_lm, vocabulary_size
from ludic.plumbing.precision import float32_products
from ludic.sharding.world import World
from ludic.training.config import TrainerConfig
from ludic.training.metrics.stats import StatBuffer
from ludic.training.types import Loss
from ludic.training.update.calibrate import synthetic_batch
from ludic.training.update.checks import check_packing
from ludic.training.update.device_memory import release_memory
from ludic.training.update.optimizer import GradientsHeld, MasterAdamW
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy


class _RoomForOptimizer:
    """Takes an optimizer's memory and its place in a pass, and forgets the gradients."""

    sends_gradients = False

    def __init__(self, model: nn.Module, cfg: TrainerConfig) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        # A gradient in float32; two moments, and a master of a weight that is narrower.
        state = 0 if cfg.optimizer_device == "cpu" else 8
        self.room = [
            torch.empty(
                p.numel() * (4 + state + (4 if state and p.element_size() < 4 else 0)),
                dtype=torch.uint8,
                device=p.device,
            )
            for p in self.trained
        ]

    def accumulate(self) -> None:
        for parameter in self.trained:
            parameter.grad = None

    def gradients_held(self) -> GradientsHeld:
        return {}

    def take_back(self, before: GradientsHeld) -> list[nn.Parameter]:
        self.accumulate()
        return []


def trial_pass(model: nn.Module, loss: Loss, cfg: TrainerConfig, world: World) -> None:
    """Computes the gradient of a made-up batch as large as one micro-batch may be, with the
    optimizer's memory taken, and forgets it. Weights, gradients and random numbers stay as they
    were. Raises `OutOfMemoryError` if not even its rows fit, one at a time and recomputed."""
    assert cfg.micro_token_budget is not None
    on_gpu = world.device.type == "cuda"
    vocab = vocabulary_size(base_causal_lm(model))
    batch = synthetic_batch(cfg.micro_token_budget, cfg.max_seq_len, 1.0, vocab)
    with torch.random.fork_rng(devices=[world.device] if on_gpu else []):
        policy = Policy(model, cfg)
        with float32_products(cfg.precision):
            check_packing(policy, world.device, cfg.max_seq_len)
        passes, room = Passes(policy, loss, cfg, world, Cost()), None
        try:
            room = cast(MasterAdamW, _RoomForOptimizer(model, cfg))
            passes.accumulate(lay_out(batch), room, StatBuffer(), version=0, proximal=None)
        finally:
            for parameter in model.parameters():
                parameter.grad = None
            del passes, policy, room
            release_memory()
