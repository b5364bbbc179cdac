"""Puts an engine together for a module: sizes, memory, and the way it runs."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.local import attention
from ludic.inference.local.arena import KVShape, SlotMemory
from ludic.inference.local.eager import EagerScheduler
from ludic.inference.local.family_check import check_known_attention, check_same_logits
from ludic.inference.local.gpu.device_batch import DeviceBatch, GraphCache
from ludic.inference.local.gpu.fused_layer import fused_layers
from ludic.inference.local.gpu.kept_tokens import KeptTokens
from ludic.inference.local.gpu.pipelined import PipelinedScheduler
from ludic.inference.local.gpu.prefill import Prefill
from ludic.inference.local.prefix_store import PrefixStore
from ludic.inference.local.row_sizes import candidate_sizes, equal_row_sizes, with_random_values
from ludic.inference.local.scheduler import Scheduler
from ludic.inference.local.sizes import cache_tokens, context_tokens, kv_shape
from ludic.inference.local.view import Forward, check_servable, module_view
from ludic.plumbing.model_parts import text_config

_log = logging.getLogger("ludic.inference")
_FAST_STEP_ROWS = 512


def build_scheduler(
    model: nn.Module,
    tokenizer: Any,
    *,
    max_slots: int,
    max_context_tokens: int | None,
    deterministic: bool | None,
    step_rows: int | None,
    prefix_cache_tokens: int | None,
    pipelined: bool | None,
    version: int,
) -> Scheduler:
    """A scheduler over `model`. None stands for what the model and the device suggest. Raises
    `ConfigError` for a module that cannot be served exactly, and for settings that do not fit."""
    check_servable(model)
    text = text_config(model)
    check_known_attention(model, text)
    shape = kv_shape(model, text)
    device = shape.device
    if deterministic and pipelined:
        raise ConfigError("deterministic and pipelined: steps that run ahead have no fixed shapes")
    if deterministic is None:
        deterministic = device.type == "cpu" and not pipelined
    if pipelined is None:
        pipelined = device.type == "cuda" and not deterministic
    context = context_tokens(max_context_tokens, text, device)
    if step_rows is not None and step_rows < 2:
        # One row alone takes another code path in most linear algebra libraries.
        raise ConfigError(f"step_rows={step_rows}: must be at least 2")
    if prefix_cache_tokens is None:
        prefix_cache_tokens = cache_tokens(shape, device)
    attention.register()
    kernels = usable_kernels(shape) if pipelined else None
    # In float32 the fused norm is the same to the bit; in bfloat16 it rounds once less, which is
    # worth it only where launches are what a step costs.
    fuse = shape.dtype == torch.float32 or (device.type == "cuda" and pipelined)
    look: dict[str, Any] = {"fuse_norms": fuse}
    if kernels is not None:
        look["stand_in"] = fused_layers(kernels)
    forward = Forward(module_view(model, **look), device)
    check_same_logits(model, forward, shape, context, tokenizer)
    memory = SlotMemory(shape, max_slots=max_slots, max_tokens=context, single_length=pipelined)
    if not pipelined:
        sizes = None
        if deterministic:
            parameters = sum(p.numel() for p in model.parameters())
            sizes = (step_rows,) if step_rows else candidate_sizes(parameters, max_slots)
            positions = int(getattr(text, "max_position_embeddings", 0) or 512)
            trial = Forward(with_random_values(module_view(model, **look)), device, forward.direct)
            sizes = equal_row_sizes(trial, sizes, text.vocab_size, positions, device)
        rows = sizes[-1] if sizes else _FAST_STEP_ROWS
        store = PrefixStore[Tensor](prefix_cache_tokens)
        return EagerScheduler(
            forward, sizes, memory, store, tokenizer, step_rows=rows, version=version
        )
    graphs = GraphCache(
        device,
        capture=device.type == "cuda",
        weights=lambda: [*model.parameters(), *model.buffers()],
    )
    vocab = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    parts: dict[str, Any] = {"vocab": vocab, "graphs": graphs, "kernels": kernels}
    batch = DeviceBatch(forward, memory.only, max_slots, **parts)
    prefill = Prefill(forward, memory.only, **parts)
    kept = KeptTokens(memory.only, prefix_cache_tokens)
    return PipelinedScheduler(batch, prefill, kept, memory, tokenizer, version=version)


def usable_kernels(shape: KVShape) -> ModuleType | None:
    """Our Triton kernels where they run: an NVIDIA GPU since Ampere, and heads they can tile."""
    dim = shape.head_dim
    if shape.device.type != "cuda" or dim not in (16, 32, 64, 128, 256):
        return None
    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        return None
    try:
        from ludic.inference.local.gpu import kernels
    except ImportError:  # Triton comes with torch's CUDA builds on Linux, and with no other
        return None
    return kernels if can_launch(kernels, shape.device) else None


def can_launch(kernels: Any, device: torch.device) -> bool:
    """Whether a kernel can be compiled here: Triton needs a C compiler, which not all have."""
    try:
        one = torch.ones(1, device=device)
        kernels.silu_times(one.clone(), one)
    except Exception as exc:
        _log.warning(
            "Triton cannot compile a kernel here (%s: %s): the in-process engine works without "
            "its own kernels, at about half the speed. It needs a C compiler, such as gcc",
            type(exc).__name__,
            exc,
        )
        return False
    return True
