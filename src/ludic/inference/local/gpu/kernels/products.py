"""Norms, projections, and the gate between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PROJECT_ROWS = 256
"""Above this a matrix product is bound by arithmetic, and the vendor's kernels are better."""


@triton.jit
def _multiply(
    x, w, rows, inner, first_row, first_col, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """A tile of x @ w.T; `inner` is a multiple of K, w's rows a multiple of N."""
    row = first_row + tl.arange(0, M)
    at_k = tl.arange(0, K)
    x_at = x + row[:, None] * inner + at_k[None, :]
    w_at = w + (first_col + tl.arange(0, N))[None, :] * inner + at_k[:, None]
    total = tl.zeros((M, N), dtype=tl.float32)
    for _ in range(0, inner, K):
        total = tl.dot(tl.load(x_at, mask=row[:, None] < rows, other=0.0), tl.load(w_at), total)
        x_at += K
        w_at += K
    return total


@triton.jit
def _project_kernel(
    x, w0, w1, w2, b0, b1, b2, out, rows, inner, tiles0, tiles1, width,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile, first_row = tl.program_id(0), tl.program_id(1) * M
    w, b, place = w0, b0, tile
    if tile >= tiles0 + tiles1:
        w, b, place = w2, b2, tile - tiles0 - tiles1
    elif tile >= tiles0:
        w, b, place = w1, b1, tile - tiles0
    total = _multiply(x, w, rows, inner, first_row, place * N, M, N, K)
    col = tl.arange(0, N)
    if BIAS:
        total += tl.load(b + place * N + col).to(tl.float32)[None, :]
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
    tile, row_tile = 32, min(32, _row_tile(rows))
    tiles = [n // tile for n in counts]
    given = [w if b is None else b for w, b in zip(weights, biases, strict=True)]
    _project_kernel[(sum(tiles), triton.cdiv(rows, row_tile))](
        x, *weights, *given, out, rows, inner, tiles[0], tiles[1], out.shape[1],
        BIAS=biases[0] is not None, M=row_tile, N=tile, K=64,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    x, gate, up, out, rows, inner, width, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    first_col, first_row = tl.program_id(0) * N, tl.program_id(1) * M
    row = first_row + tl.arange(0, M)
    at_k = tl.arange(0, K)
    x_at = x + row[:, None] * inner + at_k[None, :]
    offsets = (first_col + tl.arange(0, N))[None, :] * inner + at_k[:, None]
    gates = tl.zeros((M, N), dtype=tl.float32)
    ups = tl.zeros((M, N), dtype=tl.float32)
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
    row_tile, tile = _row_tile(rows), 32
    _gated_kernel[(width // tile, triton.cdiv(rows, row_tile))](
        x, gate, up, out, rows, inner, width,
        M=row_tile, N=tile, K=64, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


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
def _rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    wide = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    result = wide * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight. A norm inside the product that follows keeps the product from loading
    ahead, and takes longer than both."""
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x, weight, out, width, eps, BLOCK=block, num_warps=4 if block <= 2048 else 8
    )
    return out
