"""Triton kernels for what lies between a layer's products: norms, rotations, the gate.

Each reads its tensors once and rounds once, as the engine's do; a family's own code makes up to
eight passes, forward and backward, and rounds at each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_NORM_PROGRAMS = 512
"""Each sums the gradient for the norm's weight over its share of the rows."""


P = ParamSpec("P")
R = TypeVar("R")


def _where_the_tensors_are(launch: Callable[P, R]) -> Callable[P, R]:
    """Triton launches on the thread's device, which need not be the tensors'."""

    @wraps(launch)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]
            return launch(*args, **kwargs)

    return launched


@triton.jit
def _norm_kernel(
    x, y, total, weight, out, scales, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    place = row * width + at
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        added = wide.to(total.dtype.element_ty)
        tl.store(total + place, added, mask=inside)
        wide = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(scales + row, scale)
    tl.store(out + place, (wide * scale * weights).to(out.dtype.element_ty), mask=inside)


@_where_the_tensors_are
def norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x / rms(x) * weight, 1 / rms(x) for each row, and x, which is x + y where there is a y."""
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x, x if y is None else y, total, weight, out, scales, width, eps,
        ADD=y is not None, BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out, scales, total


@triton.jit
def _norm_gradient_kernel(
    grad, through, x, weight, scales, out, partial, rows, width, step,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    first = program * step
    at = tl.arange(0, BLOCK)
    inside = at < width
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(tl.minimum(step, rows - first)):
        row = first + i
        place = row * width + at
        scale = tl.load(scales + row)
        unit = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        total += g * unit
        g = g * weights
        result = (g - unit * (tl.sum(g * unit, 0) / width)) * scale
        if ADD:
            result += tl.load(through + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    tl.store(partial + program * width + at, total, mask=inside)


@_where_the_tensors_are
def norm_gradient(
    grad: Tensor, through: Tensor | None, x: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients for a norm's input and its weight, from that of its output, and from
    `through`, that of the input's other users."""
    rows, width = x.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(width)
    step = max(triton.cdiv(rows, _NORM_PROGRAMS), 1)
    programs = max(triton.cdiv(rows, step), 1)
    partial = x.new_empty(programs, width, dtype=torch.float32)
    _norm_gradient_kernel[(programs,)](
        grad, grad if through is None else through, x, weight, scales, out, partial,
        rows, width, step, ADD=through is not None, BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out, partial.sum(0).to(weight.dtype)


@triton.jit
def _gate_kernel(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@_where_the_tensors_are
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    out = torch.empty_like(gate)
    size = gate.numel()
    _gate_kernel[(triton.cdiv(size, _BLOCK),)](gate, up, out, size, BLOCK=_BLOCK)
    return out


@triton.jit
def _gate_gradient_kernel(gate, up, grad, for_gate, for_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    silu = g * s
    kind = grad.dtype.element_ty
    tl.store(for_gate + at, (d * u * (s + silu * (1 - s))).to(kind), mask=inside)
    tl.store(for_up + at, (d * silu).to(kind), mask=inside)
    tl.store(grad + at, (silu * u).to(kind), mask=inside)


@_where_the_tensors_are
def gated_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up once more, written over `grad`, the gradient for it, and the gradients for
    `gate` and `up`."""
    for_gate, for_up = torch.empty_like(gate), torch.empty_like(up)
    size = gate.numel()
    _gate_gradient_kernel[(triton.cdiv(size, _BLOCK),)](
        gate, up, grad, for_gate, for_up, size, BLOCK=_BLOCK
    )
    return grad, for_gate, for_up


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, row_step, heads,
    BACK: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    half = tl.arange(0, HALF)
    cos_1 = tl.load(cos + row * DIM + half).to(tl.float32)
    cos_2 = tl.load(cos + row * DIM + HALF + half).to(tl.float32)
    sin_1 = tl.load(sin + row * DIM + half).to(tl.float32)
    sin_2 = tl.load(sin + row * DIM + HALF + half).to(tl.float32)
    head = tl.arange(0, HEADS)
    inside = (head < heads)[:, None]
    at = head[:, None] * DIM + half[None, :]
    a = tl.load(x + row * row_step + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * row_step + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        first, second = a * cos_1 + b * sin_2, b * cos_2 - a * sin_1
    else:
        first, second = a * cos_1 - b * sin_1, b * cos_2 + a * sin_2
    where = out + row * heads * DIM + at
    tl.store(where, first.to(out.dtype.element_ty), mask=inside)
    tl.store(where + HALF, second.to(out.dtype.element_ty), mask=inside)


@_where_the_tensors_are
def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x [rows, heads, dim] turned in half-split pairs by cos and sin [rows, dim]; `back` gives the
    gradient for x from that for the result."""
    rows, heads, dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != dim:
        x = x.contiguous()
    out = x.new_empty(rows, heads, dim)
    _rotate_kernel[(rows,)](
        x, cos, sin, out, x.stride(0), heads,
        BACK=back, DIM=dim, HEADS=triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
    return out
