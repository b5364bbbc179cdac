"""Puts an engine together for a module: sizes, memory, and the way it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.inference.local import attention
from ludic.inference.local.arena import KVShape, SlotMemory
from ludic.inference.local.cpu.eager import EagerRunner
from ludic.inference.local.cpu.row_sizes import (
    candidate_sizes,
    equal_row_sizes,
    with_random_values,
)
from ludic.inference.local.family_check import check_known_attention, check_same_logits
from ludic.inference.local.forward import Forward
from ludic.inference.local.gpu.device_batch import DeviceBatch, length_buckets
from ludic.inference.local.gpu.graphs import GraphCache
from ludic.inference.local.gpu.pipelined import PipelinedScheduler
from ludic.inference.local.gpu.prefill import Prefill
from ludic.inference.local.module_view import check_servable, device_and_dtype, module_view
from ludic.inference.local.prefix_store import PrefixStore
from ludic.inference.local.scheduler import Scheduler
from ludic.inference.local.sequence import Sequence

_log = logging.getLogger("ludic.inference")
_CPU_CACHE_BYTES = 256 << 20
_GPU_CACHE_BYTES = 4 << 30
_GPU_CONTEXT = 4096
_FAST_PREFILL = 512
_GPU_PREFILL = 32_768


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the user asked for; None: to be decided by the model and the device."""

    max_slots: int
    max_context_tokens: int | None
    deterministic: bool | None
    step_rows: int | None
    prefix_cache_tokens: int | None
    pipelined: bool | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an engine runs with."""

    max_slots: int
    max_context_tokens: int
    deterministic: bool
    step_rows: tuple[int, ...] | None
    prefix_cache_tokens: int
    device: torch.device


def build_scheduler(
    model: nn.Module,
    settings: EngineSettings,
    *,
    decode: Callable[[list[int]], str],
    spell: Callable[[list[int]], str],
    describe: Callable[[Sequence], str],
    version: int,
) -> tuple[Scheduler, Resolved]:
    """A scheduler over `model`, and the settings it runs with. Raises `ConfigError` for a module
    that cannot be served exactly."""
    check_servable(model)
    device, _ = device_and_dtype(model)
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    check_known_attention(model, text)
    resolved = _resolve(settings, text, device)
    shape = _kv_shape(model, text, device)
    cache = resolved.prefix_cache_tokens
    if cache < 0:
        cache = max(1, _cache_bytes(device) // shape.bytes_per_token)
        resolved = replace(resolved, prefix_cache_tokens=cache)
    attention.register()
    pipelined = settings.pipelined
    if pipelined is None:
        pipelined = device.type == "cuda" and not resolved.deterministic
    # In float32 the fused norm is the same to the bit; in bfloat16 it rounds once less, which is
    # worth it only where launches are what a step costs.
    fuse = shape.dtype == torch.float32 or (device.type == "cuda" and pipelined)
    kernels = usable_kernels(shape) if pipelined else None
    view = module_view(model, fuse_norms=fuse, kernels=kernels)
    memory = SlotMemory(
        shape,
        max_slots=resolved.max_slots,
        max_tokens=resolved.max_context_tokens,
        single_length=pipelined,
    )
    forward = Forward(view, device)
    check_same_logits(model, forward, shape, resolved.max_context_tokens)
    sizes = None
    if resolved.deterministic:
        trial = with_random_values(module_view(model, fuse_norms=fuse, kernels=kernels))
        sizes = _row_sizes(Forward(trial, device, forward.direct), model, settings, text, device)
    runner = EagerRunner(forward, memory, sizes)
    resolved = replace(resolved, step_rows=sizes)
    options: dict[str, Any] = {
        "decode": decode,
        "spell": spell,
        "describe": describe,
        "step_rows": sizes[-1] if sizes else _FAST_PREFILL,
        "version": version,
    }
    store = PrefixStore(cache)
    if not pipelined:
        return Scheduler(runner, memory, store, **options), resolved
    graphs = GraphCache(
        device,
        capture=device.type == "cuda",
        weights=lambda: [*model.parameters(), *model.buffers()],
    )
    vocab = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    batch = DeviceBatch(forward, memory.only, resolved.max_slots, vocab, graphs, kernels)
    prefill = Prefill(
        forward,
        memory.only,
        trash=resolved.max_slots,
        vocab=vocab,
        lengths=length_buckets(memory.only.length),
        max_tokens=_GPU_PREFILL,
        graphs=graphs,
        to_device=batch.to_device,
        kernels=kernels,
    )
    return PipelinedScheduler(batch, prefill, runner, memory, store, **options), resolved


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


def _resolve(settings: EngineSettings, config: Any, device: torch.device) -> Resolved:
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    wanted = settings.max_context_tokens
    if wanted is None:
        if not limit:
            raise ConfigError("the model names no longest context: set max_context_tokens")
        wanted = min(limit, _GPU_CONTEXT) if device.type == "cuda" else limit
    if limit and wanted > limit:
        raise ConfigError(f"max_context_tokens={wanted} is more than the model's {limit} positions")
    if wanted < 2:
        raise ConfigError(f"max_context_tokens={wanted}: a prompt and a completion need 2")
    exact = settings.deterministic
    if exact is None:
        exact = device.type == "cpu"
    if settings.step_rows is not None and settings.step_rows < 2:
        # One row alone takes another code path in most linear algebra libraries.
        raise ConfigError(f"step_rows={settings.step_rows}: must be at least 2")
    cache = settings.prefix_cache_tokens
    return Resolved(
        max_slots=settings.max_slots,
        max_context_tokens=wanted,
        deterministic=exact,
        step_rows=None,
        prefix_cache_tokens=-1 if cache is None else cache,
        device=device,
    )


def _row_sizes(
    forward: Forward,
    model: nn.Module,
    settings: EngineSettings,
    config: Any,
    device: torch.device,
) -> tuple[int, ...]:
    if settings.step_rows is not None:
        sizes: tuple[int, ...] = (settings.step_rows,)
    else:
        sizes = candidate_sizes(sum(p.numel() for p in model.parameters()), settings.max_slots)
    positions = int(getattr(config, "max_position_embeddings", 0) or 512)
    return equal_row_sizes(forward, sizes, config.vocab_size, positions, device)


def _cache_bytes(device: torch.device) -> int:
    return _GPU_CACHE_BYTES if device.type == "cuda" else _CPU_CACHE_BYTES


def _kv_shape(model: nn.Module, config: Any, device: torch.device) -> KVShape:
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ConfigError(
            f"{type(model).__name__} has no attention heads: the in-process engine serves families "
            "that keep keys and values"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    _, dtype = device_and_dtype(model)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return KVShape(config.num_hidden_layers, kv_heads, head_dim, dtype, device)
