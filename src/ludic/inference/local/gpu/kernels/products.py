"""Norms, projections, and the gate between them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.gpu.kernels.early import (
    call_up,
    launch_options,
    let_next_begin,
    wait_for_others,
)

MAX_PROJECT_ROWS = 256
"""Above this a matrix product is bound by arithmetic, and the vendor's kernels are better."""

MAX_SPLIT_ELEMENTS = 5 << 20
"""Weights of more elements than this are read faster by the vendor's kernels than by ours."""


@triton.jit
def _multiply(
    x, w, rows, inner, first_row, first_col,
    DESCRIBED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of x @ w.T; `inner` is a multiple of K, w's rows a multiple of N. `x` may be a
    descriptor of itself."""
    row = first_row + tl.arange(0, M)
    at_k = tl.arange(0, K)
    w_at = w + (first_col + tl.arange(0, N))[None, :] * inner + at_k[:, None]
    total = tl.zeros((M, N), dtype=tl.float32)
    if DESCRIBED:
        for k in range(0, inner, K):
            total = tl.dot(x.load([first_row, k]), tl.load(w_at), total)
            w_at += K
    else:
        x_at = x + row[:, None] * inner + at_k[None, :]
        for _ in range(0, inner, K):
            a = tl.load(x_at, mask=row[:, None] < rows, other=0.0)
            total = tl.dot(a, tl.load(w_at), total)
            x_at += K
            w_at += K
    return total


@triton.jit
def _project_kernel(
    x, w0, w1, w2, b0, b1, b2, out, rows, inner, tiles0, tiles1, width,
    BIAS: tl.constexpr, EARLY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile, first_row = tl.program_id(0), tl.program_id(1) * M
    w, b, place = w0, b0, tile
    if tile >= tiles0 + tiles1:
        w, b, place = w2, b2, tile - tiles0 - tiles1
    elif tile >= tiles0:
        w, b, place = w1, b1, tile - tiles0
    col = tl.arange(0, N)
    bias = tl.zeros((N,), dtype=tl.float32)
    if BIAS:
        bias = tl.load(b + place * N + col).to(tl.float32)
    wait_for_others(EARLY)
    total = _multiply(x, w, rows, inner, first_row, place * N, EARLY, M, N, K) + bias[None, :]
    let_next_begin(EARLY)
    row = first_row + tl.arange(0, M)
    at = out + row[:, None] * width + (tile * N + col)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row[:, None] < rows)


def project(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], biases: tuple[Tensor | None, ...]
) -> Tensor:
    """[x @ w0.T + b0 | x @ w1.T + b1 | x @ w2.T + b2], side by side: [rows, n0 + n1 + n2]."""
    rows, inner = x.shape
    counts = [w.shape[0] for w in weights]
    out = x.new_empty(rows, sum(counts))
    options = launch_options(x.device)
    tile, row_tile, step = 32, min(32, _row_tile(rows)), 64
    given: Any = x
    if options["EARLY"]:
        row_tile, step = _row_tile(rows), 128 if inner % 128 == 0 else 64
        (given,) = _described((x, row_tile), step=step)
    tiles = [n // tile for n in counts]
    some = [w if b is None else b for w, b in zip(weights, biases, strict=True)]
    _project_kernel[(sum(tiles), triton.cdiv(rows, row_tile))](
        given, *weights, *some, out, rows, inner, tiles[0], tiles[1], out.shape[1],
        BIAS=biases[0] is not None, M=row_tile, N=tile, K=step,
        num_warps=4, num_stages=4, **options,
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    x, gate, up, out, rows, inner, width,
    EARLY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    first_col, first_row = tl.program_id(0) * N, tl.program_id(1) * M
    row = first_row + tl.arange(0, M)
    gates = tl.zeros((M, N), dtype=tl.float32)
    ups = tl.zeros((M, N), dtype=tl.float32)
    let_next_begin(EARLY)
    wait_for_others(EARLY)
    if EARLY:
        for k in range(0, inner, K):
            a = x.load([first_row, k])
            gates = tl.dot(a, gate.load([first_col, k]).T, gates)
            ups = tl.dot(a, up.load([first_col, k]).T, ups)
    else:
        at_k = tl.arange(0, K)
        x_at = x + row[:, None] * inner + at_k[None, :]
        offsets = (first_col + tl.arange(0, N))[None, :] * inner + at_k[:, None]
        for _ in range(0, inner, K):
            a = tl.load(x_at, mask=row[:, None] < rows, other=0.0)
            gates = tl.dot(a, tl.load(gate + offsets), gates)
            ups = tl.dot(a, tl.load(up + offsets), ups)
            x_at += K
            offsets += K
    result = gates * tl.sigmoid(gates) * ups
    at = out + row[:, None] * width + (first_col + tl.arange(0, N))[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=row[:, None] < rows)


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T)."""
    rows, inner = x.shape
    width = gate.shape[0]
    out = x.new_empty(rows, width)
    row_tile, tile, step = _row_tile(rows), 32, 64
    options = launch_options(x.device)
    given: tuple[Any, ...] = (x, gate, up)
    if options["EARLY"]:
        given = _described((x, row_tile), (gate, tile), (up, tile), step=step)
    _gated_kernel[(width // tile, triton.cdiv(rows, row_tile))](
        *given, out, rows, inner, width,
        M=row_tile, N=tile, K=step, num_warps=4, num_stages=4, **options,
    )  # fmt: skip
    return out


def _described(*tiles: tuple[Tensor, int], step: int) -> tuple[Any, ...]:
    """Descriptors of matrices read in tiles of so many rows by `step`, for the hardware that copies
    whole tiles; what lies outside of a matrix reads as zero."""
    # A Triton without early launches may be without these.
    from triton.tools.tensor_descriptor import TensorDescriptor

    return tuple(TensorDescriptor.from_tensor(matrix, [rows, step]) for matrix, rows in tiles)


@triton.jit
def _split_product_kernel(
    y, w, weight, parts, rows, inner, width,
    EARLY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    first_col, first_row, split = tl.program_id(0) * N, tl.program_id(1) * M, tl.program_id(2)
    share = tl.cdiv(tl.cdiv(inner, K), tl.num_programs(2)) * K
    begin = split * share
    end = tl.minimum(begin + share, inner)
    let_next_begin(EARLY)
    if tl.program_id(1) == 0:
        for n in range(N):
            call_up(weight + (first_col + n) * inner + begin, (end - begin) * 2, EARLY)
    wait_for_others(EARLY)
    total = tl.zeros((M, N), dtype=tl.float32)
    for k in range(begin, end, K):
        total = tl.dot(y.load([first_row, k]), w.load([first_col, k]).T, total)
    row = first_row + tl.arange(0, M)
    at = row[:, None] * width + (first_col + tl.arange(0, N))[None, :]
    tl.store(parts + split * rows * width + at, total, mask=row[:, None] < rows)


def split_product(y: Tensor, weight: Tensor) -> Tensor:
    """Two float32 parts [2, rows, width] whose sum is y @ weight.T, for `rms_norm` to add up.

    Each is half as long a sum, and nobody waits for the other: sums that the last program to
    arrive adds up take 1 µs more.
    """
    rows, inner = y.shape
    width = weight.shape[0]
    parts = torch.empty(2, rows, width, dtype=torch.float32, device=y.device)
    row_tile, tile, step = _row_tile(rows), 32, 128
    # Five stages leave room for one program on a multiprocessor: for long sums of one wave.
    stages = 5 if rows <= 128 and inner >= 2048 else 4
    _split_product_kernel[(width // tile, triton.cdiv(rows, row_tile), len(parts))](
        *_described((y, row_tile), (weight, tile), step=step), weight, parts, rows, inner, width,
        M=row_tile, N=tile, K=step, num_warps=4, num_stages=stages, **launch_options(y.device),
    )  # fmt: skip
    return parts


def _row_tile(rows: int) -> int:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


@triton.jit
def _silu_times_kernel(gates, ups, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gates + at, mask=inside).to(tl.float32)
    u = tl.load(ups + at, mask=inside).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


def silu_times(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) * ups, for tensors of one shape, written over `gates`."""
    size = gates.numel()
    _silu_times_kernel[(triton.cdiv(size, 2048),)](gates, ups, gates, size, BLOCK=2048, num_warps=8)
    return gates


@triton.jit
def _rms_norm_kernel(
    x, parts, weight, out, rows, width, eps,
    PARTS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    scales = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    let_next_begin(EARLY)
    wait_for_others(EARLY)
    wide = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(parts + (part * rows + row) * width + at, mask=inside, other=0.0)
        added = (wide + total).to(x.dtype.element_ty)
        tl.store(x + row * width + at, added, mask=inside)
        wide = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(out + row * width + at, (wide * scale * scales).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, parts: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight. The sum of `parts` is added to x first, and written there.

    A norm inside the product that follows keeps the product from loading ahead, and takes longer
    than both.
    """
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x, x if parts is None else parts, weight, out, rows, width, eps,
        PARTS=0 if parts is None else len(parts), BLOCK=block,
        num_warps=4 if block <= 2048 and parts is None else 8, **launch_options(x.device),
    )  # fmt: skip
    return out
