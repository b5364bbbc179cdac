"""Finds the largest `micro_token_budget` that fits a device by trying real updates, and tries the
largest micro-batch once before a run depends on it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import nn

from ludic.errors import ConfigError, OutOfMemoryError
from ludic.memory.plan import HEADROOM, settled
from ludic.plumbing.model_parts import base_causal_lm, vocabulary_size
from ludic.plumbing.precision import float32_products
from ludic.saw.batch import make_batch
from ludic.saw.items import SampleAttachments, SAWBatch, SAWItem
from ludic.sharding.world import World, release_memory
from ludic.training.config import TrainerConfig
from ludic.training.metrics.stats import StatBuffer
from ludic.training.types import Loss
from ludic.training.update.budget import plan_update
from ludic.training.update.checks import check_packing
from ludic.training.update.host_optimizer import make_optimizer
from ludic.training.update.optimizer import GradientsHeld, MasterAdamW, ProductSums
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy

ROUND = 256


@dataclass(frozen=True, slots=True)
class Calibration:
    """The budget to set, and the peak memory of an update with it, in bytes; `reserved_bytes` are
    left to others on the device."""

    micro_token_budget: int
    peak_bytes: int
    total_bytes: int
    reserved_bytes: int = 0


def calibrate(
    model: nn.Module,
    loss: Loss,
    cfg: TrainerConfig | None = None,
    *,
    action_share: float = 0.5,
    headroom: float = 0.08,
    max_tokens: int = 1 << 20,
    reserved_bytes: int = 0,
) -> Calibration:
    """The largest budget whose update leaves `headroom` of the memory free, and `reserved_bytes`
    for an engine or a server that will share the device (`ludic.runs.memory`).

    `model` is as it will be trained: with adapters, in its type, on its device. The more of the
    tokens are actions, the more memory the head needs: `action_share` is what to count with. The
    weights do not change. Needs a GPU.
    """
    cfg = cfg or TrainerConfig()
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ConfigError(
            f"calibrate measures a GPU's memory, and the model is on {device}: on a CPU, choose "
            "micro_token_budget by hand"
        )
    policy, world = Policy(model, cfg), World(device=device)
    with float32_products(cfg.precision):
        check_packing(policy, device, cfg.max_seq_len)
    optimizer = make_optimizer(model.named_parameters(), replace(cfg, precision=None))
    vocab = vocabulary_size(base_causal_lm(model))
    total = torch.cuda.get_device_properties(device).total_memory

    def peak(tokens: int) -> int | None:
        """The peak of an update over one micro-batch; None where it does not fit."""
        settings = replace(cfg, micro_token_budget=tokens, max_seq_len=min(cfg.max_seq_len, tokens))
        passes = Passes(policy, loss, settings, world, Cost(), recovers=False)
        batch = synthetic_batch(tokens, settings.max_seq_len, action_share, vocab)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        fits = update_fits(passes, batch, optimizer)
        return torch.cuda.max_memory_allocated(device) if fits else None

    smallest = max(min(cfg.max_seq_len, 2048), ROUND)
    limit = trainer_limit(total, headroom, reserved_bytes)
    plan = plan_update(model, cfg, world)
    if plan is not None:  # where to begin looking
        plan = settled(
            plan,
            int(limit / (1 - HEADROOM)),
            smallest,
            checkpointing=plan.training.checkpointing,
            most=max_tokens,
        )
    budget, used = largest_that_fits(
        peak,
        limit=limit,
        smallest=smallest,
        largest=max_tokens,
        first=plan.training.tokens if plan else None,
    )
    optimizer.close()
    return Calibration(budget, used, total, reserved_bytes)


def update_fits(passes: Passes, batch: SAWBatch, optimizer: MasterAdamW) -> bool:
    """Whether an update over `batch` gets through; one that does not leaves nothing behind."""
    try:
        passes.accumulate(lay_out(batch), optimizer, StatBuffer(), version=0, proximal=None)
        optimizer.step(0.0)  # makes room for the moments; a rate of 0 moves nothing
    except (OutOfMemoryError, torch.OutOfMemoryError):
        optimizer.start_over()
        return False
    return True


def trainer_limit(total: int, headroom: float, reserved_bytes: int) -> int:
    """What an update may take; raises `OutOfMemoryError` where the others leave nothing."""
    limit = int(total * (1 - headroom)) - reserved_bytes
    if limit <= 0:
        raise OutOfMemoryError(
            f"sampling alone takes {reserved_bytes / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB: lower inference.slots or inference.max_context_tokens"
        )
    return limit


def largest_that_fits(
    peak: Callable[[int], int | None],
    *,
    limit: int,
    smallest: int,
    largest: int,
    first: int | None = None,
) -> tuple[int, int]:
    """The largest size, in steps of 256, whose peak is within `limit`, and that peak.

    `peak` grows with the size, about linearly, and is None where a try fails: two small tries
    give the line, and the guess it makes is tested, and corrected by halving what is unknown.
    `first` is a guess to begin with.
    """
    low, low_peak = smallest, peak(smallest)
    if low_peak is None or low_peak > limit:
        raise OutOfMemoryError(
            f"not even {smallest} tokens fit: set gradient_checkpointing=True, train an adapter, "
            "give an engine in the same process fewer slots, or shard the model over more devices"
        )
    high: int | None = None
    guess = min(max(first or 2 * smallest, smallest + ROUND), largest)
    while True:
        guess = max(low + ROUND, guess // ROUND * ROUND)
        if guess > largest or (high is not None and guess >= high):
            return low, low_peak
        used = peak(guess)
        if used is None or used > limit:
            high = guess
            guess = (low + high) // 2
        else:
            slope = max((used - low_peak) / (guess - low), 1e-9)
            low, low_peak = guess, used
            guess = min(int(low + (limit - used) / slope), largest)
            if high is not None:
                guess = min(guess, (low + high) // 2)


def synthetic_batch(tokens: int, longest: int, action_share: float, vocab: int) -> SAWBatch:
    """Sequences of `longest` tokens that fill `tokens`; their ends are actions."""
    rng, items, left = np.random.default_rng(0), [], tokens
    while left >= 2:
        length = min(longest, left)
        left -= length
        mask = np.zeros(length, np.int8)
        mask[-max(int(length * action_share), 1) :] = 1
        mask[0] = 0
        logprobs = np.full(int(mask.sum()), -np.log(vocab), np.float32)
        attachments = SampleAttachments(
            behavior_logprobs=logprobs, reference_logprobs=logprobs, teacher_logprobs=logprobs
        )
        ids, shown = rng.integers(0, vocab, length), np.ones(length, np.int8)
        items.append(SAWItem(ids, shown, mask, 1.0, attachments=attachments))
    return make_batch(items)


class _RoomForOptimizer:
    """Takes an optimizer's memory and its place in a pass, and forgets the gradients."""

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

    def product_sums(self) -> ProductSums:
        return lambda parameter: None

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
