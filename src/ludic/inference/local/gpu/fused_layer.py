"""A decoder layer in seven launches instead of forty, for families with the same architecture.

It replaces a cloned layer in the engine's view and uses the weights of the same submodules. A LoRA
layer's products are computed together with those of its projection. Any other submodule (a
quantised one, DoRA) is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ludic.inference.local.attention import AttentionCall, current_layout
from ludic.inference.local.gpu.layouts import HALF
from ludic.plumbing.llama_layers import (
    FAMILIES,
    Adapter,
    Projection,
    attention_window,
    can_fuse,
    norm_epsilon,
    projection,
)

MAX_RANK = 64
"""Adapters of a higher rank are called as they are: a kernel would recompute too much."""


def can_tabulate(module: nn.Module) -> bool:
    """Whether it is one of the known families' rotary embedding, with frequencies that stay."""
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return (
        model_type in FAMILIES
        and type(module).__name__.endswith("RotaryEmbedding")
        and getattr(module, "rope_type", None) in ("default", "linear", "llama3", "yarn")
        and isinstance(getattr(module, "inv_freq", None), Tensor)
    )


def _weights(module: nn.Module) -> Projection | None:
    """The module's weights, if the kernels take its adapter, too."""
    weights = projection(module)
    if weights is None:
        return None
    fits = all(
        part.is_contiguous() and part.data_ptr() % 16 == 0
        for adapter in weights.adapters
        for part in (adapter.down, adapter.up)
    )
    small = all(adapter.down.shape[0] <= MAX_RANK for adapter in weights.adapters)
    return weights if fits and small else None


def _alike(*modules: nn.Module) -> tuple[Projection, ...] | None:
    """Their weights, if one kernel can multiply with all of them: matrices in a half type, of sizes
    that tiles divide, all with a bias or none, all with an adapter of one rank or none."""
    weights = [_weights(m) for m in modules]
    tileable = tuple(w for w in weights if w is not None and _tiles_divide(w.base.weight))
    kinds = {(w.base.bias is None, *(a.down.shape[0] for a in w.adapters)) for w in tileable}
    return tileable if len(tileable) == len(modules) and len(kinds) == 1 else None


def _tiles_divide(weight: Tensor) -> bool:
    return (
        weight.dtype in HALF
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[0] % 32 == 0
        and weight.shape[1] % 64 == 0
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
    """What one layer of a view passes to the next besides its output: parts of a sum that the next
    one's first norm adds. Only the engine's thread calls the view."""

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
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """What the layer does, with the sums written over its input."""
        x, attention = hidden_states[0], self.self_attn
        cos, sin = position_embeddings
        parts = self.between.take(attention.layer_idx)
        q, k, v = self._project(self._normed(x, self.input_layernorm, parts))
        rotary, window = (cos[0], sin[0]), attention_window(attention)
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
        alike = _alike(*modules) if x.shape[0] <= self.kernels.MAX_PROJECT_ROWS else None
        if alike is not None:
            weights = tuple(w.base.weight for w in alike)
            biases = tuple(w.base.bias for w in alike)
            both = self.kernels.project(x, weights, biases, _adapters(alike))
            parts = both.split([w.shape[0] for w in weights], dim=1)
        else:
            parts = tuple(m(x) for m in modules)
        q, k, v = (p.unflatten(1, (-1, attention.head_dim)) for p in parts)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = self.mlp.gate_proj, self.mlp.up_proj
        alike = _alike(gate, up) if x.shape[0] <= self.kernels.MAX_PROJECT_ROWS else None
        if alike is not None and alike[0].base.bias is None:
            first, second = (w.base.weight for w in alike)
            product: Tensor = self.kernels.gated(x, first, second, _adapters(alike))
            return product
        return self.kernels.silu_times(gate(x), up(x))  # type: ignore[no-any-return]

    def _normed(self, x: Tensor, norm: nn.Module, parts: Tensor | None) -> Tensor:
        """The norm of x, after the parts are added into x."""
        eps = norm_epsilon(norm)
        if eps is None:
            if parts is not None:
                x += parts.sum(0)
            return norm(x)  # type: ignore[no-any-return]
        return self.kernels.rms_norm(x, norm.weight, eps, parts)  # type: ignore[no-any-return]

    def _add(self, x: Tensor, y: Tensor, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
        """x + linear(y), into x where one product does both, and parts that are yet to be added."""
        weights = _weights(linear)
        if weights is None or weights.base.bias is not None:
            return x + linear(y), None
        weight, kernels, rows = weights.base.weight, self.kernels, x.shape[0]
        few = rows <= kernels.MAX_PROJECT_ROWS and _tiles_divide(weight)
        # It pays as a link of a chain of early launches. Alone, the vendor's kernel is as good.
        if (
            few
            and kernels.can_be_early(x.device)
            and kernels.split_pays(rows, weight, adapted=bool(weights.adapters))
        ):
            return x, kernels.split_product(y, weight, weights.adapters)
        x = x.addmm_(y, weight.t())
        for adapter in weights.adapters:
            if few:
                x = kernels.add_low_rank(x, y, adapter)
            else:
                x = x.addmm_(y @ adapter.down.t(), adapter.up.t(), alpha=adapter.scale)
        return x, None


def _adapters(weights: tuple[Projection, ...]) -> tuple[Adapter, ...]:
    return tuple(adapter for w in weights for adapter in w.adapters)
