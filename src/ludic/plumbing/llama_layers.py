"""Decoder layers that are built alike, from Llama to Qwen3: what trainer and engine compute with
fewer and larger kernels than the families' own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are: norm, attention with half-split rotary embedding, add, norm, gated
SiLU, add. Others run as their own code says."""

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


class Adapter(NamedTuple):
    """A low-rank addition to a matrix: `scale * up @ down`. The shapes are [rank, inner] for `down`
    and [width, rank] for `up`."""

    down: Tensor
    up: Tensor
    scale: float


class Projection(NamedTuple):
    """What a linear layer multiplies with: a matrix, and a LoRA layer's adapter."""

    base: nn.Linear
    adapters: tuple[Adapter, ...]


def can_fuse(layer: nn.Module) -> bool:
    """Whether the layer is one of the known families' and has its parts and no others."""
    from torch import nn
    from transformers.activations import ACT2FN

    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    config = getattr(attention, "config", None)
    if attention is None or mlp is None or getattr(config, "model_type", None) not in FAMILIES:
        return False
    norms = {"input_layernorm", "post_attention_layernorm"}
    return (
        set(layer._modules) == norms | {"self_attn", "mlp"}
        and set(attention._modules) - {"q_norm", "k_norm"} == _ATTENTION
        and {"gate_proj", "up_proj", "down_proj"} <= set(mlp._modules)
        and isinstance(getattr(mlp, "act_fn", None), nn.SiLU | type(ACT2FN["silu"]))
    )


def projection(module: nn.Module) -> Projection | None:
    """The weights of an ordinary linear layer, or of one with an ordinary LoRA adapter of its own
    type that drops nothing; None for anything else."""
    from torch import nn

    if type(module) is nn.Linear:
        return Projection(module, ())
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or type(module).__module__ != "peft.tuners.lora.layer":
        return None
    layer: Any = module
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.merged or len(active) != 1:
        return None
    if layer.disable_adapters:
        return Projection(base, ())
    (name,) = active
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    parts_are_plain = all(
        type(part) is nn.Linear and part.bias is None and part.weight.dtype == base.weight.dtype
        for part in (down, up)
    )
    drops = dropout.training and getattr(dropout, "p", 0) > 0
    # A variant, such as DoRA, is another formula over the same matrices.
    if not parts_are_plain or drops or name in layer.lora_variant:
        return None
    return Projection(base, (Adapter(down.weight, up.weight, float(layer.scaling[name])),))


def norm_epsilon(norm: nn.Module) -> float | None:
    """The epsilon of a plain root-mean-square norm that its weight scales; None of another kind."""
    plain = set(norm._parameters) == {"weight"} and not norm._modules
    return getattr(norm, "variance_epsilon", None) if plain else None


def attention_window(attention: Any) -> int | None:
    """As the families' own code has it: Mistral reads its configuration, the others an attribute,
    and Llama has none even where its configuration names one."""
    config = attention.config
    of_all = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    window: int | None = getattr(attention, "sliding_window", of_all)
    return window
