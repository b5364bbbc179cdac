"""The model of a server: which checkpoint it was started from, and whether it uses the weights as
they are stored. Imported by vLLM alone.

vLLM rebuilds every layer when weights are reloaded, because quantised, packed or merged weights
differ from the checkpoint's. Without any of these, new values can be written straight into the
parameters. Layers that are not known to be plain are rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludic.sharding.weights import weight_files

Shape = tuple[int, ...]

_NEVER_SENT = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def checkpoint_shapes(
    model: str, *, revision: str | None = None, cache: str | None = None
) -> dict[str, Shape] | None:
    """What is in `model`, a folder or a name on the hub that was downloaded (into `cache`, else
    the hub's own); None where that cannot be found out."""
    from safetensors import safe_open

    folder = _local_folder(model, revision, cache)
    shapes: dict[str, Shape] = {}
    try:
        for file in [] if folder is None else weight_files(folder):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
    except FileNotFoundError:  # not all of it is here
        return None
    return {n: s for n, s in shapes.items() if not n.endswith(_NEVER_SENT)} or None


def same_under_other_names(one: Mapping[str, Shape], other: Mapping[str, Shape]) -> bool:
    """Whether both have tensors of the same shapes and no name in common: transformers renames
    some models' tensors when it loads them, and vLLM knows them by either name."""
    return not one.keys() & other.keys() and sorted(one.values()) == sorted(other.values())


def _local_folder(model: str, revision: str | None, cache: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (OSError, ValueError):  # not downloaded by this name, or no such name
        return None


_LAYERS = "vllm.model_executor.layers"
_STORED_PLAIN = frozenset(
    {
        f"{_LAYERS}.linear.UnquantizedLinearMethod",
        f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod",
    }
)
_ATTENTION = f"{_LAYERS}.attention.attention.Attention"
_NORMS = frozenset(
    {
        f"{_LAYERS}.layernorm.RMSNorm",
        f"{_LAYERS}.layernorm.GemmaRMSNorm",
        f"{_LAYERS}.layernorm.LayerNorm",
        "torch.nn.modules.normalization.LayerNorm",
    }
)


def why_rebuild(model: nn.Module, model_config: Any, device: torch.device) -> str | None:
    """Why new weights need vLLM's reload, layer by layer; None: they may be written in place."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the device is {'rocm' if torch.version.hip else device.type}"
    if getattr(model_config, "quantization", None) is not None:
        return f"the weights are quantised ({model_config.quantization})"
    if getattr(model_config, "use_mla", False):
        return "multi-head latent attention keeps weights that it computed from others"
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        why = _why_module(module, device)
        if why is not None:
            return f"{name or 'the model'}: {why}"
        for parameter in module.parameters(recurse=False):
            other = owners.setdefault(id(parameter), name)
            if other != name and not ties_words(model_config):
                return f"{name} shares a parameter with {other}"
    return None


def _why_module(module: nn.Module, device: torch.device) -> str | None:
    kind = _name(module)
    if kind.startswith("vllm.lora."):
        return f"{type(module).__name__} wraps a layer for adapters"
    own = dict(module.named_parameters(recurse=False))
    if any(parameter.device.type != device.type for parameter in own.values()):
        return "its parameters lie on another device"
    method = getattr(module, "quant_method", None)
    if kind == _ATTENTION:
        sinks = getattr(getattr(module, "impl", None), "sinks", None)
        if own or method is not None or sinks is not None:
            return "its attention has its own parameters"
        return None
    if hasattr(module, "process_weights_after_loading"):
        return f"{type(module).__name__} computes something from its weights"
    if method is not None:
        if _name(method) not in _STORED_PLAIN:
            return f"its weights are stored by {type(method).__name__}"
        if not all(hasattr(parameter, "weight_loader") for parameter in own.values()):
            return "its parameters were replaced after they were loaded"
        return None
    if own and kind not in _NORMS:
        return f"{type(module).__name__} is not known to use its parameters as they are"
    return None


def ties_words(model_config: Any) -> bool:
    """Whether the output head has the embedding's weight."""
    text = getattr(model_config, "hf_text_config", None)
    config = text or getattr(model_config, "hf_config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
