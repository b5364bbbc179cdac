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


def can_tabulate(module: nn.Module) -> bool:
    """Whether it is one of the known families' rotary embedding, with frequencies that stay."""
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return (
        model_type in FAMILIES
        and type(module).__name__.endswith("RotaryEmbedding")
        and getattr(module, "rope_type", None) in ("default", "linear", "llama3", "yarn")
        and isinstance(getattr(module, "inv_freq", None), Tensor)
    )


def _plain(*modules: nn.Module) -> bool:
    """Whether they are ordinary linear layers in a half type, of sizes that tiles divide."""
    return all(
        type(m) is nn.Linear
        and m.weight.dtype in HALF
        and m.weight.is_contiguous()
        and m.weight.data_ptr() % 16 == 0
        and m.in_features % 64 == 0
        and m.out_features % 32 == 0
        for m in modules
    )


def fused_layers(kernels: ModuleType) -> Callable[[nn.Module], nn.Module | None]:
    """The stand-ins of a module view whose layers run through `kernels`."""
    between = _Between()

    def stand_in(module: nn.Module) -> nn.Module | None:
        if can_tabulate(module):
            tables = RotaryTables.__new__(RotaryTables)
            tables.__dict__["kernels"] = kernels
            return tables
        if not can_fuse(module):
            return None
        layer = FusedLayer.__new__(FusedLayer)
        layer.__dict__["kernels"] = kernels
        layer.__dict__["between"] = between
        between.layers.add(module.self_attn.layer_idx)  # type: ignore[union-attr,arg-type]
        return layer

    return stand_in


class _Between:
    """What one layer of a view leaves to the next beside its output: parts of a sum that the next
    one's first norm adds. The engine's thread alone calls the view."""

    def __init__(self) -> None:
        self.layers: set[int] = set()
        self._left: tuple[int, Tensor] | None = None

    def leave(self, layer: int, parts: Tensor) -> bool:
        """Whether there is a next layer that takes them."""
        takes = layer + 1 in self.layers
        self._left = (layer, parts) if takes else None
        return takes

    def take(self, layer: int) -> Tensor | None:
        left, self._left = self._left, None
        # What a pass that failed has left is nobody's.
        return left[1] if left is not None and left[0] == layer - 1 else None


class RotaryTables(nn.Module):
    """Takes the place of a rotary embedding for which `can_tabulate` is true."""

    inv_freq: Tensor
    attention_scaling: float
    kernels: ModuleType

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [batch, rows, dim], in the type of `x`."""
        cos, sin = self.kernels.rotary_tables(
            self.inv_freq, position_ids.flatten(), self.attention_scaling, x.dtype
        )
        return cos.view(*position_ids.shape, -1), sin.view(*position_ids.shape, -1)


class FusedLayer(nn.Module):
    """Takes the place of a layer for which `can_fuse` is true."""

    self_attn: Any
    mlp: Any
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    kernels: ModuleType
    between: _Between

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        """What the layer does, with the sums written over its input."""
        x, attention = hidden_states[0], self.self_attn
        cos, sin = position_embeddings
        parts = self.between.take(attention.layer_idx)
        q, k, v = self._project(self._normed(x, self.input_layernorm, parts))
        rotary, window = (cos[0], sin[0]), _window(attention)
        mixed = current_layout().attend(
            AttentionCall(attention.layer_idx, q, k, v, attention.scaling, window, rotary)
        )
        x, parts = self._add(x, mixed.reshape(x.shape[0], -1), attention.o_proj)
        y = self._gated(self._normed(x, self.post_attention_layernorm, parts))
        x, parts = self._add(x, y, self.mlp.down_proj)
        if parts is not None and not self.between.leave(attention.layer_idx, parts):
            x += parts.sum(0)
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

    def _normed(self, x: Tensor, norm: nn.Module, parts: Tensor | None) -> Tensor:
        """The norm of x, after the parts are added into x."""
        eps = getattr(norm, "variance_epsilon", None)
        if eps is None or set(norm._parameters) != {"weight"}:
            if parts is not None:
                x += parts.sum(0)
            return norm(x)  # type: ignore[no-any-return]
        return self.kernels.rms_norm(x, norm.weight, eps, parts)  # type: ignore[no-any-return]

    def _add(self, x: Tensor, y: Tensor, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
        """x + linear(y), into x where one product does both, and parts that are yet to be added."""
        if type(linear) is not nn.Linear or linear.bias is not None:
            return x + linear(y), None
        weight, kernels = linear.weight, self.kernels
        few = (
            x.shape[0] <= kernels.MAX_PROJECT_ROWS and weight.numel() <= kernels.MAX_SPLIT_ELEMENTS
        )
        # It pays as a link of a chain of early launches. Alone, the vendor's kernel is as good.
        if few and _plain(linear) and kernels.can_be_early(x.device):
            return x, kernels.split_product(y, weight)
        return x.addmm_(y, weight.t()), None


def _window(attention: Any) -> int | None:
    """As the families' own code has it: Mistral reads its configuration, the others an attribute,
    and Llama has none even where its configuration names one."""
    config = attention.config
    of_all = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    window: int | None = getattr(attention, "sliding_window", of_all)
    return window
