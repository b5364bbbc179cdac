"""A decoder layer in seven launches instead of forty, for families that are built alike.

It takes a cloned layer's place in the engine's view and calls the same submodules' weights. A
submodule that is not what it seems (a LoRA layer, a quantised one) is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ludic.inference.local.attention import AttentionCall, current_layout
from ludic.inference.local.gpu.layouts import HALF

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are: norm, attention with half-split rotary embedding, add, norm, gated
SiLU, add. Others run as their own code says."""

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def can_fuse(layer: nn.Module) -> bool:
    """Whether the layer is one of the known families' and has its parts and no others."""
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


def _plain(*modules: nn.Module) -> bool:
    """Whether they are ordinary linear layers in a half type, of sizes that tiles divide."""
    return all(
        type(m) is nn.Linear
        and m.weight.dtype in HALF
        and m.weight.is_contiguous()
        and m.in_features % 64 == 0
        and m.out_features % 32 == 0
        for m in modules
    )


def fused_layers(kernels: ModuleType) -> Callable[[nn.Module], nn.Module | None]:
    """The stand-ins of a module view whose layers run through `kernels`."""

    def stand_in(module: nn.Module) -> nn.Module | None:
        if not can_fuse(module):
            return None
        layer = FusedLayer.__new__(FusedLayer)
        layer.__dict__["kernels"] = kernels
        return layer

    return stand_in


class FusedLayer(nn.Module):
    """Takes the place of a layer for which `can_fuse` is true."""

    self_attn: Any
    mlp: Any
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    kernels: ModuleType

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        """What the layer does, with the sums written over its input."""
        x, attention = hidden_states[0], self.self_attn
        cos, sin = position_embeddings
        q, k, v = self._project(self._normed(x, self.input_layernorm))
        rotary, window = (cos[0], sin[0]), _window(attention)
        mixed = current_layout().attend(
            AttentionCall(attention.layer_idx, q, k, v, attention.scaling, window, rotary)
        )
        x = _add(x, mixed.reshape(x.shape[0], -1), attention.o_proj)
        x = _add(x, self._gated(self._normed(x, self.post_attention_layernorm)), self.mlp.down_proj)
        return x[None]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.self_attn
        modules = (attention.q_proj, attention.k_proj, attention.v_proj)
        alike = _plain(*modules) and len({m.bias is None for m in modules}) == 1
        if x.shape[0] <= self.kernels.MAX_PROJECT_ROWS and alike:
            weights = tuple(m.weight for m in modules)
            both = self.kernels.project(x, weights, tuple(m.bias for m in modules))
            parts = both.split([w.shape[0] for w in weights], dim=1)
        else:
            parts = tuple(m(x) for m in modules)
        q, k, v = (p.unflatten(1, (-1, attention.head_dim)) for p in parts)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = self.mlp.gate_proj, self.mlp.up_proj
        plain = _plain(gate, up) and gate.bias is None and up.bias is None
        if x.shape[0] <= self.kernels.MAX_PROJECT_ROWS and plain:
            return self.kernels.gated(x, gate.weight, up.weight)  # type: ignore[no-any-return]
        return self.kernels.silu_times(gate(x), up(x))  # type: ignore[no-any-return]

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        eps = getattr(norm, "variance_epsilon", None)
        if eps is None or set(norm._parameters) != {"weight"}:
            return norm(x)  # type: ignore[no-any-return]
        return self.kernels.rms_norm(x, norm.weight, eps)  # type: ignore[no-any-return]


def _window(attention: Any) -> int | None:
    """As the families' own code has it: Mistral reads its configuration, the others an attribute,
    and Llama has none even where its configuration names one."""
    config = attention.config
    of_all = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    window: int | None = getattr(attention, "sliding_window", of_all)
    return window


def _add(x: Tensor, y: Tensor, linear: nn.Module) -> Tensor:
    """x + linear(y), into x where one product does both."""
    if type(linear) is nn.Linear and linear.bias is None:
        return x.addmm_(y, linear.weight.t())
    out: Tensor = x + linear(y)
    return out
