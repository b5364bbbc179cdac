"""The LoRA adapter of a PEFT model in the form that vLLM takes, and what vLLM does not support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.plumbing.model_parts import base_causal_lm
from ludic.sharding.weights import plain_name, whole

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")

# Settings of PEFT that change what an adapter computes, or what is trained beside it.
_MERGEABLE = ("modules_to_save", "lora_bias")
_REFUSED = (
    *_MERGEABLE,
    *("use_dora", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config"),
)
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")


class AdapterWeights:
    """The adapter's tensors one by one, under the names of a PEFT file, shards gathered.

    The scaling (alpha over rank, or over its root for rsLoRA) is multiplied into B in float32 and
    rounded once to the type of the weights below, so that a reader has nothing to get wrong: what
    vLLM makes of `alpha_pattern` and `rank_pattern` differs from version to version. Raises
    `ConfigError` for an adapter that vLLM cannot serve. Under FSDP2 iterating is a collective.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adapter = _only_adapter(model)
        _check_settings(model.peft_config[self.adapter])  # type: ignore[index]
        self.layers = _layers(model, self.adapter)
        _check_layers(model, self.layers, self.adapter)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self.layers.items():
            a = whole(layer.lora_A[self.adapter].weight)
            b = whole(layer.lora_B[self.adapter].weight).float() * layer.scaling[self.adapter]
            below = getattr(layer.get_base_layer(), "weight", a).dtype
            # Over quantised weights: its own type.
            dtype = below if below.is_floating_point else a.dtype
            yield f"{name}.lora_A.weight", a.to(dtype, copy=True)
            yield f"{name}.lora_B.weight", b.to(dtype)


def ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank of each module's adapter; raises where A and B do not belong together."""
    by_module: dict[str, int] = {}
    for name, a in tensors.items():
        if not name.endswith(SUFFIXES):
            raise ConfigError(
                f"{name} is not a tensor of an adapter: publish ModelWeights(model) of a PEFT "
                "model, or dict(AdapterWeights(model)); whole weights go through "
                "BroadcastPolicyPublisher"
            )
        if name.endswith(SUFFIXES[1]):
            continue
        module = name.removesuffix(SUFFIXES[0])
        b = tensors.get(module + SUFFIXES[1])
        if b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            has = None if b is None else tuple(b.shape)
            raise ConfigError(f"{module}: A is {tuple(a.shape)} and B is {has}: no adapter")
        by_module[module] = int(a.shape[0])
    if len(by_module) * 2 != len(tensors) or not by_module:
        raise ConfigError(
            f"{len(tensors)} tensors, but {len(by_module)} pairs of A and B: not an adapter"
        )
    return by_module


def adapter_config(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """PEFT's `adapter_config.json` of these tensors, whose scaling is in B already."""
    by_module = ranks(tensors)
    largest = max(by_module.values())
    smaller = {m.removeprefix(PREFIX): r for m, r in by_module.items() if r < largest}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "target_modules": [m.removeprefix(PREFIX) for m in by_module],
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: vLLM cannot serve that as an adapter. Publish it merged: "
        'inference.publish_lora = "merged", or BroadcastPolicyPublisher'
    )


def _only_adapter(model: nn.Module) -> str:
    active: Any = getattr(model, "active_adapters", None)
    if not hasattr(model, "peft_config") or active is None:
        raise ConfigError(
            f"{type(model).__name__} has no LoRA adapter to publish: set [model.lora], wrap the "
            'model with PEFT, or publish whole weights (inference.publish_lora = "merged")'
        )
    names = list(active() if callable(active) else active)
    if len(names) != 1:
        raise _refusal(f"{len(names)} adapters are active ({names})")
    return str(names[0])


def _check_settings(settings: Any) -> None:
    kind = getattr(settings.peft_type, "value", settings.peft_type)
    if kind != "LORA":
        raise _refusal(f"a PEFT adapter of the kind {kind}")
    for name in _REFUSED:
        value = getattr(settings, name, None)
        if value and name in _MERGEABLE:
            raise _refusal(f"LoraConfig({name}={value!r})")
        if value:
            raise ConfigError(
                f"LoraConfig({name}={value!r}): no server can be given that, as an adapter or "
                "merged: train without it"
            )
    if settings.bias != "none":
        raise _refusal(f"LoraConfig(bias={settings.bias!r})")
    start = settings.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise _refusal(f"LoraConfig(init_lora_weights={start!r}) changes the weights below it")


def _layers(model: nn.Module, adapter: str) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if adapter in getattr(module, "lora_embedding_A", {}):
            raise _refusal(f"{plain_name(name)} is an embedding with an adapter")
        if adapter in getattr(module, "lora_A", {}):
            layers[PREFIX + plain_name(name)] = module
    if not layers:
        raise ConfigError(f"the adapter {adapter!r} has no layers: nothing to publish")
    return layers


def _check_layers(model: nn.Module, layers: Mapping[str, Any], adapter: str) -> None:
    head = base_causal_lm(model).get_output_embeddings()  # type: ignore[operator]
    for name, layer in layers.items():
        short = name.removeprefix(PREFIX)
        if layer is head:
            raise _refusal(f"{short} is the output head, and it has an adapter")
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None:
            raise _refusal(f"{short} has an adapter of the kind {type(variant).__name__}")
    own = (f".lora_A.{adapter}.", f".lora_B.{adapter}.")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in own):
            raise _refusal(f"{plain_name(name)} is trained, but is not part of the adapter")
