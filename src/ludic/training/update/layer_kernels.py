"""Triton kernels of the trainer for what lies between a layer's products: norms, the gate, and
rotations.

Each reads its tensors once, where torch and the families' own code make up to ten passes, and
rounds once, as the engine's do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.training.update.head_kernels import where_the_tensors_are

_GATE_TILE = (16, 128)
"""Rows and columns of a program."""
_NORM_PROGRAMS = 512
"""Each sums the gradient for the norm's weight over its share of the rows."""


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


@where_the_tensors_are
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


@where_the_tensors_are
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


class LowRank(NamedTuple):
    """`scale * rows @ columns.T`, to be added to a matrix where a kernel reads it: [rows, rank] and
    [columns, rank]."""

    rows: Tensor
    columns: Tensor
    scale: float


def _added(low_rank: LowRank | None, beside: Tensor) -> tuple[tuple[Any, ...], int]:
    """A kernel's arguments for what is added, and how much of the rank it takes at a time."""
    if low_rank is None:
        return (beside, beside, 0, 0.0), 0
    rows, columns, scale = low_rank
    rank = rows.shape[1]
    taken = min(max(triton.next_power_of_2(rank), 16), 64)
    return (rows.contiguous(), columns.contiguous(), rank, scale), taken


@triton.jit
def _plus_low_rank(total, left, right, rank, scale, row, col, rows, width, RANK: tl.constexpr):
    for first in range(0, rank, RANK):
        at = first + tl.arange(0, RANK)
        a = tl.load(
            left + row[:, None] * rank + at[None, :],
            mask=(row < rows)[:, None] & (at < rank)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + col[None, :] * rank + at[:, None],
            mask=(col < width)[None, :] & (at < rank)[:, None],
            other=0.0,
        )
        total += tl.dot(a, b) * scale
    return total


@triton.jit
def _gate_and_up(
    gate, up, row, col, rows, width, gate_left, gate_right, gate_rank, gate_scale,
    up_left, up_right, up_rank, up_scale, GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr,
):  # fmt: skip
    place = row[:, None] * width + col[None, :]
    inside = (row < rows)[:, None] & (col < width)[None, :]
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    if GATE_RANK > 0:
        g = _plus_low_rank(
            g, gate_left, gate_right, gate_rank, gate_scale, row, col, rows, width, GATE_RANK
        )
    if UP_RANK > 0:
        u = _plus_low_rank(u, up_left, up_right, up_rank, up_scale, row, col, rows, width, UP_RANK)
    return g, u, place, inside


@triton.jit
def _gate_kernel(
    gate, up, out, rows, width, gate_left, gate_right, gate_rank, gate_scale,
    up_left, up_right, up_rank, up_scale,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    col = tl.program_id(0) * N + tl.arange(0, N)
    g, u, place, inside = _gate_and_up(
        gate, up, row, col, rows, width, gate_left, gate_right, gate_rank, gate_scale,
        up_left, up_right, up_rank, up_scale, GATE_RANK, UP_RANK,
    )  # fmt: skip
    tl.store(out + place, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@where_the_tensors_are
def gated(
    gate: Tensor, up: Tensor, to_gate: LowRank | None = None, to_up: LowRank | None = None
) -> Tensor:
    """silu(gate) * up, after what is to be added to them."""
    rows, width = gate.shape
    out = torch.empty_like(gate)
    (first, first_rank), (second, second_rank) = _added(to_gate, gate), _added(to_up, gate)
    _gate_kernel[_gate_programs(gate)](
        gate, up, out, rows, width, *first, *second,
        GATE_RANK=first_rank, UP_RANK=second_rank, M=_GATE_TILE[0], N=_GATE_TILE[1],
    )  # fmt: skip
    return out


def _gate_programs(gate: Tensor) -> tuple[int, int]:
    (rows, width), (tile_rows, tile_columns) = gate.shape, _GATE_TILE
    return triton.cdiv(width, tile_columns), triton.cdiv(rows, tile_rows)


@triton.jit
def _gate_gradient_kernel(
    gate, up, grad, for_gate, for_up, rows, width, gate_left, gate_right, gate_rank, gate_scale,
    up_left, up_right, up_rank, up_scale, grad_left, grad_right, grad_rank, grad_scale,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, GRAD_RANK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    col = tl.program_id(0) * N + tl.arange(0, N)
    g, u, place, inside = _gate_and_up(
        gate, up, row, col, rows, width, gate_left, gate_right, gate_rank, gate_scale,
        up_left, up_right, up_rank, up_scale, GATE_RANK, UP_RANK,
    )  # fmt: skip
    d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    if GRAD_RANK > 0:
        d = _plus_low_rank(
            d, grad_left, grad_right, grad_rank, grad_scale, row, col, rows, width, GRAD_RANK
        )
    s = tl.sigmoid(g)
    silu = g * s
    kind = grad.dtype.element_ty
    tl.store(for_gate + place, (d * u * (s + silu * (1 - s))).to(kind), mask=inside)
    tl.store(for_up + place, (d * silu).to(kind), mask=inside)
    tl.store(grad + place, (silu * u).to(kind), mask=inside)


@where_the_tensors_are
def gated_gradient(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    to_gate: LowRank | None = None,
    to_up: LowRank | None = None,
    to_grad: LowRank | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up once more, written over `grad`, the gradient for it, and the gradients for
    `gate` and `up`; all after what is to be added to them."""
    rows, width = gate.shape
    for_gate, for_up = torch.empty_like(gate), torch.empty_like(up)
    (first, first_rank), (second, second_rank), (third, third_rank) = (
        _added(low_rank, gate) for low_rank in (to_gate, to_up, to_grad)
    )
    _gate_gradient_kernel[_gate_programs(gate)](
        gate, up, grad, for_gate, for_up, rows, width, *first, *second, *third,
        GATE_RANK=first_rank, UP_RANK=second_rank, GRAD_RANK=third_rank,
        M=_GATE_TILE[0], N=_GATE_TILE[1],
    )  # fmt: skip
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


@where_the_tensors_are
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
