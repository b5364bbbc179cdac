"""A decoder layer's training pass for families with the same architecture: the same numbers with
fewer passes over memory, and fewer tensors kept for the backward pass.

Matrix products go through `_Products` and `_GatedMLP`. These sum several products' gradients inside
the products themselves, compute a LoRA layer's low-rank products together with those of its layer,
and keep nothing for frozen weights. In `adding_to` they also add weights' gradients to the
optimizer's, in float32. Everything between products is done by Triton kernels (`kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ludic.plumbing.contexts import holding
from ludic.plumbing.llama_layers import Projection, attention_window, norm_epsilon, projection
from ludic.training.update.logprobs import triton_works
from ludic.training.update.optimizer import AddProduct, ProductSums

_sums: ContextVar[ProductSums | None] = ContextVar("ludic_product_sums", default=None)
_PARTS = 4
"""The tensors of a projection: matrix, bias, and an adapter's two."""


def adding_to(sums: ProductSums | None) -> AbstractContextManager[None]:
    """Has the backward pass of every forward pass inside add its weights' gradients to `sums`,
    wherever and whenever it runs; what they do not take goes to autograd."""
    return holding(_sums, sums)


def fused_forward(
    own: Callable[..., Any], layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """What `own`, the forward pass of a layer for which `can_fuse` is true, does, in fewer kernels
    where that is possible: for packed sequences in a half type on a GPU."""
    parts = None
    if _suits(hidden_states) and not args and kwargs.get("cu_seq_lens_q") is not None:
        parts = _Parts.of(layer, hidden_states)
    if parts is None:
        if (sums := _sums.get()) is not None:
            for parameter in layer.parameters():
                sums(parameter)  # a use: another layer's products must not add to its gradient
        return own(layer, hidden_states, *args, **kwargs)
    return parts(hidden_states, **kwargs)


def _suits(x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and not torch.is_autocast_enabled("cuda")
        and triton_works(x.device)
    )


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to be called when the module is, or has changed what it does."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class _Parts:
    """A layer's weights as they are now: an adapter may have been switched off."""

    def __init__(self, layer: Any, products: list[Projection], eps: tuple[float, float]) -> None:
        self.layer, self.eps = layer, eps
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = products

    @classmethod
    def of(cls, layer: Any, x: Tensor) -> _Parts | None:
        """None where a part is of a kind that is not known here."""
        attention, mlp = layer.self_attn, layer.mlp
        modules = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        found = [projection(m) for m in (*modules, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        products = [p for p in found if p is not None]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        eps = [e for n in norms if (e := norm_epsilon(n)) is not None]
        width = attention.head_dim
        rotates = width & (width - 1) == 0  # what the kernel takes
        alike = all(type(p) is nn.Parameter and p.dtype == x.dtype for p in layer.parameters())
        watched = any(_is_watched(module) for module in layer.modules() if module is not layer)
        if len(products) < len(found) or len(eps) < 2 or not (alike and rotates) or watched:
            return None
        return cls(layer, products, (eps[0], eps[1]))

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        layer, attention = self.layer, self.layer.self_attn
        x, h = _norm(hidden_states[0], None, layer.input_layernorm.weight, self.eps[0])
        q, k, v = (
            part.view(len(part), -1, attention.head_dim)
            for part in _products(h, self.q, self.k, self.v)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = (t[0].contiguous() for t in position_embeddings)
        q, k = (_Rotated.apply(t, cos, sin) for t in (q, k))  # type: ignore[no-untyped-call]
        attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        mixed, _ = attend(
            attention,
            *(t.transpose(0, 1)[None] for t in (q, k, v)),
            attention_mask,
            dropout=attention.attention_dropout if attention.training else 0.0,
            scaling=attention.scaling,
            sliding_window=attention_window(attention),
            **kwargs,
        )
        (y,) = _products(mixed[0].flatten(1), self.o)
        x, h = _norm(x, y, layer.post_attention_layernorm.weight, self.eps[1])
        return (x + _GatedMLP.apply(h, *_tensors(self.gate, self.up, self.down)))[None]  # type: ignore[no-any-return, no-untyped-call]


def _tensors(*projections: Projection) -> tuple[Any, ...]:
    """The adapters' factors; for each tensor what adds to its gradient, if autograd is not to; and
    each projection's `_PARTS` tensors, one after the other."""
    tensors: list[Tensor | None] = []
    for base, adapters in projections:
        down, up = (adapters[0].down, adapters[0].up) if adapters else (None, None)
        tensors += [base.weight, base.bias, down, up]
    scales = tuple(p.adapters[0].scale if p.adapters else 0.0 for p in projections)
    sums = _sums.get()
    adds = [None if sums is None or t is None or t.ndim < 2 else sums(t) for t in tensors]
    return scales, adds, *tensors


def _products(x: Tensor, *projections: Projection) -> tuple[Tensor, ...]:
    return _Products.apply(x, *_tensors(*projections))  # type: ignore[no-any-return, no-untyped-call]


def _multiply(
    x: Tensor, tensors: Sequence[Tensor | None], scales: Sequence[float]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """x through each projection, and through each adapter's first half."""
    results, lows = [], []
    for i, scale in enumerate(scales):
        weight, bias, down, up = tensors[i * _PARTS : (i + 1) * _PARTS]
        assert weight is not None
        result, low = F.linear(x, weight, bias), None
        if down is not None and up is not None:
            low = x @ down.t()
            result.addmm_(low, up.t(), alpha=scale)
        results.append(result)
        lows.append(low)
    return results, lows


def _reads_input(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a gradient of theirs is made of the input: of all but the biases'."""
    return any(t is not None and t.requires_grad for i, t in enumerate(tensors) if i % _PARTS != 1)


def _multiply_back(
    grads: Sequence[Tensor],
    x: Tensor,
    lows: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    scales: Sequence[float],
    adds: Sequence[AddProduct | None],
    wanted: Sequence[bool],
    into_x: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients for x, if it is wanted, and for those of the tensors that are and have none
    that is added to."""
    for_x: Tensor | None = None
    for_tensors: list[Tensor | None] = []

    def add(a: Tensor, b: Tensor) -> None:
        nonlocal for_x
        for_x = a @ b if for_x is None else for_x.addmm_(a, b)

    def for_matrix(number: int, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor | None:
        add_product = adds[number]
        if not wanted[number] or (add_product is not None and add_product(a, b, scale)):
            return None
        return a @ b if scale == 1.0 else (a @ b).mul_(scale)

    for i, (grad, low, scale) in enumerate(zip(grads, lows, scales, strict=True)):
        first = i * _PARTS
        weight, _, down, up = tensors[first : first + _PARTS]
        assert weight is not None
        if into_x:
            add(grad, weight)
        for_tensors.append(for_matrix(first, grad.t(), x))
        for_tensors.append(grad.sum(0) if wanted[first + 1] else None)
        for_down = for_up = None
        if down is not None and up is not None and low is not None:
            for_low = (grad @ up).mul_(scale)
            if into_x:
                add(for_low, down)
            for_down = for_matrix(first + 2, for_low.t(), x)
            for_up = for_matrix(first + 3, grad.t(), low, scale)
        for_tensors += [for_down, for_up]
    return for_x, for_tensors


class _Products(torch.autograd.Function):
    """Linear layers of one input, each with its adapter if it has one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scales: tuple[float, ...],
        adds: list[AddProduct | None],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        results, lows = _multiply(x, tensors, scales)
        ctx.scales, ctx.adds = scales, adds
        ctx.save_for_backward(x if _reads_input(tensors) else None, *lows, *tensors)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *others = ctx.saved_tensors
        lows, tensors = others[: len(grads)], others[len(grads) :]
        into_x, _, _, *wanted = ctx.needs_input_grad
        for_x, for_tensors = _multiply_back(
            grads, x, lows, tensors, ctx.scales, ctx.adds, wanted, into_x
        )
        return for_x, None, None, *for_tensors


class _GatedMLP(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)). What goes into `down` is computed again in the backward pass:
    reading gate and up gives it with their gradients, and it is the largest tensor of a layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scales: tuple[float, ...],
        adds: list[AddProduct | None],
        *tensors: Tensor | None,
    ) -> Tensor:
        (gate, up), lows = _multiply(x, tensors[: 2 * _PARTS], scales[:2])
        inner = _kernels().gated(gate, up)
        (result,), more = _multiply(inner, tensors[2 * _PARTS :], scales[2:])
        ctx.scales, ctx.adds = scales, adds
        reads_x = _reads_input(tensors[: 2 * _PARTS])
        ctx.save_for_backward(x if reads_x else None, gate, up, *lows, *more, *tensors)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gate, up, *others = ctx.saved_tensors
        lows, tensors, scales, adds = others[:3], others[3:], ctx.scales, ctx.adds
        into_x, _, _, *wanted = ctx.needs_input_grad
        grad = grad.contiguous()
        # `inner` is needed for the gradients of `down` alone, but comes with the others.
        weight, _, down, low_up = tensors[2 * _PARTS :]
        for_inner = grad @ weight
        if down is not None:
            for_inner.addmm_((grad @ low_up).mul_(scales[2]), down)
        inner, for_gate, for_up = _kernels().gated_gradient(gate, up, for_inner)
        down_only = slice(2 * _PARTS, None)
        _, of_down = _multiply_back(
            [grad],
            inner,
            lows[2:],
            tensors[down_only],
            scales[2:],
            adds[down_only],
            wanted[down_only],
            False,
        )
        for_x, of_others = _multiply_back(
            [for_gate, for_up], x, lows[:2], tensors[: 2 * _PARTS], scales[:2], adds, wanted, into_x
        )
        return for_x, None, None, *of_others, *of_down


def _norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, or x where there is no y, and its norm."""
    return _Norm.apply(x, y, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, scales, total = _kernels().norm(x, y, weight, eps)
        ctx.save_for_backward(total, weight, scales)
        ctx.adds = y is not None
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> Any:
        x, weight, scales = ctx.saved_tensors
        if grad is None:
            return through, through if ctx.adds else None, None, None
        through = None if through is None else through.contiguous()
        for_x, for_weight = _kernels().norm_gradient(grad.contiguous(), through, x, weight, scales)
        return for_x, for_x if ctx.adds else None, for_weight, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _kernels().rotated(x, cos, sin)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _kernels().rotated(grad, *ctx.saved_tensors, back=True), None, None


def _kernels() -> Any:
    """Imported when a layer is fused: elsewhere there may be no Triton."""
    from ludic.training.update import kernels

    return kernels
