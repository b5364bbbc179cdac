"""Defaults for the tokens of a forward pass and for recomputation, from the memory plan.

`ludic.memory` does the arithmetic; this file supplies the module that is trained and the free
memory of its device.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ludic.memory.plan import Plan, settled, with_logits
from ludic.memory.shape import Adapter, ModelShape
from ludic.memory.update import Training
from ludic.plumbing.model_parts import base_causal_lm, config_facts
from ludic.plumbing.precision import Precision
from ludic.sharding.world import World
from ludic.training.config import TrainerConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

USUAL = 16_384
"""The most tokens of a pass on a CPU, which gains nothing from more."""


def filled_in(cfg: TrainerConfig, model: nn.Module, mesh: DeviceMesh | None) -> TrainerConfig:
    """Returns the settings with `micro_token_budget`, `gradient_checkpointing` and `keep_logits` as
    they are planned, where they are None. All ranks must call it, and get the same."""
    if None not in (cfg.micro_token_budget, cfg.gradient_checkpointing, cfg.keep_logits):
        return cfg
    device = torch.device(mesh.device_type) if mesh else next(model.parameters()).device
    plan = plan_update(model, cfg, World.of(mesh, device))
    return cfg if plan is None else as_planned(cfg, plan)


def as_planned(cfg: TrainerConfig, plan: Plan) -> TrainerConfig:
    """Returns the settings with what a plan has settled."""
    how = plan.training
    return replace(
        cfg,
        micro_token_budget=how.tokens,
        gradient_checkpointing=how.checkpointing,
        keep_logits=how.keep_logits,
    )


def default_budget(model: nn.Module, cfg: TrainerConfig, world: World) -> int:
    """Returns the tokens of one forward pass: as many as fit and are worthwhile, the same on all
    ranks, each of which must ask."""
    plan = plan_update(model, cfg, world)
    return plan.training.tokens if plan else max(USUAL, cfg.max_seq_len)


def trainer_bytes(model: nn.Module, cfg: TrainerConfig, world: World) -> int | None:
    """What a trainer will need of its device beside the weights; None for a model that does not say
    how large it is."""
    plan = plan_update(model, replace(cfg, keep_logits=cfg.keep_logits or 0), world)
    return None if plan is None else plan.total - plan.parts["weights"]


def plan_update(model: nn.Module, cfg: TrainerConfig, world: World) -> Plan | None:
    """What training `model` will take, with everything that `cfg` leaves open settled; None for a
    model that does not say how large it is. It may not fit."""
    shape, device = shape_of(model), world.device.type
    if shape is None:
        return None
    how = Training(
        tokens=cfg.max_seq_len,
        precision=cfg.precision or _precision_of(model),
        device="cuda" if device == "cuda" else "cpu",
        adapter=adapter_of(model),
        optimizer_device=cfg.optimizer_device or "cuda",
        fused_layers=cfg.fused_layers and not cfg.compile and _is_of_one_type(model),
        ranks=world.size,
    )
    free = int(-world.largest(-capacity(model, world))[0])
    plan = settled(
        Plan(shape, how),
        free,
        cfg.max_seq_len,
        tokens=cfg.micro_token_budget,
        checkpointing=cfg.gradient_checkpointing,
        most=None if device == "cuda" else USUAL,
    )
    return with_logits(plan, free, cfg.keep_logits)


def shape_of(model: nn.Module) -> ModelShape | None:
    """How large a model is, its parameters counted."""
    shape = ModelShape.of(config_facts(base_causal_lm(model)))
    if shape is None:
        return None
    sizes = [(name, p.numel(), p.requires_grad) for name, p in model.named_parameters()]
    own = sum(size for name, size, _ in sizes if "lora_" not in name)
    return replace(shape, counted=own, trained=sum(size for _, size, trained in sizes if trained))


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter that is trained, if one is, as LoRA; others take less."""
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return None
    adapter = next(iter(configs.values()))
    targets = getattr(adapter, "target_modules", None)
    if targets is None or isinstance(targets, str):
        return Adapter(getattr(adapter, "r", 0))
    return Adapter(getattr(adapter, "r", 0), tuple(sorted(targets)))


def capacity(model: nn.Module, world: World) -> int:
    """What trainer and model may take of this rank's device. On a CPU that is a share of all there
    is, not of what happens to be free: micro-batches, and the last bits of a gradient, must not
    depend on what else runs."""
    if world.device.type != "cuda":
        return host_memory() // world.size
    here = sum(
        p.numel() * p.element_size()
        for p in model.parameters()
        if p.device.type == "cuda" and type(p.data) is torch.Tensor
    )
    return free_memory(world.device) + here


def free_memory(device: torch.device) -> int:
    """What is free on a GPU, with what torch holds there and does not use."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def host_memory() -> int:
    """The memory of this machine, or of the container that it shows us."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(said)) if said.isdigit() else total


def _is_of_one_type(model: nn.Module) -> bool:
    return len({p.dtype for p in model.parameters()}) == 1


def _precision_of(model: nn.Module) -> Precision:
    narrow = torch.finfo(next(model.parameters()).dtype).bits < 32
    return "bfloat16" if narrow else "float32"
