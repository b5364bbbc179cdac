"""Puts an engine together for a module: the size of a token's keys and values, the longest context,
the prefix cache, the mode, and how much device memory all of it takes."""

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
from ludic.inference.local.view import Forward, check_servable, device_and_dtype, module_view
from ludic.memory import engine
from ludic.memory.shape import ModelShape
from ludic.plumbing.model_parts import base_causal_lm, config_facts, text_config

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
        prefix_cache_tokens = engine.cache_tokens(shape.bytes_per_token, device.type)
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
    batch = DeviceBatch(forward, memory.only, max_slots, vocab, graphs, kernels)
    prefill = Prefill(forward, memory.only, graphs, kernels)
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


def context_tokens(wanted: int | None, config: Any, device: torch.device) -> int:
    """The longest prompt plus completion; raises `ConfigError` for more than the model takes."""
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    if wanted is None:
        if not limit:
            raise ConfigError("the model names no longest context: set max_context_tokens")
        wanted = engine.default_context(limit, device.type)
    if limit and wanted > limit:
        raise ConfigError(
            f"max_context_tokens={wanted} is more than the model's {limit} positions: set it to "
            f"{limit} at most"
        )
    if wanted < 2:
        raise ConfigError(f"max_context_tokens={wanted}: a prompt and a completion need 2")
    return wanted


def kv_shape(model: nn.Module, config: Any) -> KVShape:
    """What a token of this model keeps, and where."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ConfigError(
            f"{type(model).__name__} has no attention heads: the in-process engine serves families "
            "that keep keys and values"
        )
    try:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    except Exception as exc:  # transformers raises for sizes that differ from layer to layer
        raise ConfigError(
            f"{type(model).__name__} does not say how large its keys are ({exc}): the in-process "
            "engine serves families whose layers are alike; sample through a vLLM server "
            "(VLLMChatClient) instead"
        ) from exc
    device, dtype = device_and_dtype(model)
    return KVShape(config.num_hidden_layers, kv_heads, head_dim, dtype, device)


def engine_memory(
    model: nn.Module,
    *,
    max_slots: int,
    max_context_tokens: int | None = None,
    deterministic: bool | None = None,
    prefix_cache_tokens: int | None = None,
    device: torch.device | None = None,
) -> engine.EngineMemory:
    """What a `LocalChatClient` with these settings takes on a GPU, beside the model's weights.

    `device`: where the engine will be; None: where the model is.
    """
    model = base_causal_lm(model)
    config = text_config(model)
    kv = kv_shape(model, config)
    shape = ModelShape.of(config_facts(model))
    if shape is None:
        raise ConfigError(f"{type(model).__name__} does not say how large its layers are")
    where = device or kv.device
    context = context_tokens(max_context_tokens, config, where)
    how = engine.Engine(max_slots, context, bool(deterministic), prefix_cache_tokens)
    return engine.engine_bytes(shape, how, item=kv.dtype.itemsize, device=where.type)
