"""What adapters add to products: `scale * x @ down.T @ up.T`.

x @ down.T is a launch of its own, for all the projections that take the same x; the products add
the rest at their end. To compute x @ down.T in each program that needs it saves the launch, and
takes longer where the weights are large.
"""

from __future__ import annotations

from typing import NamedTuple

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
from ludic.plumbing.llama_layers import Adapter


@triton.jit
def up_tile_of(up, first_col, rank, N: tl.constexpr, RANK: tl.constexpr):
    """A tile of up.T, [RANK, N]; zero beyond the rank."""
    at_rank = tl.arange(0, RANK)
    at = up + (first_col + tl.arange(0, N))[None, :] * rank + at_rank[:, None]
    return tl.load(at, mask=at_rank[:, None] < rank, other=0.0)


@triton.jit
def plus_low_rank(
    total, low, up_tile, row, rows, place, scale,
    COUNT: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """total + scale * low @ up.T of adapter `place`."""
    sums = tl.zeros((M, RANK), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = ((part * rows + row[:, None]) * COUNT + place) * RANK + tl.arange(0, RANK)[None, :]
        sums += tl.load(low + at, mask=row[:, None] < rows, other=0.0)
    # Into the sum that is there: another one would not fit into the registers.
    return tl.dot((sums * scale).to(up_tile.dtype), up_tile, total)


@triton.jit
def _low_kernel(
    x, down0, down1, down2, low, rows, inner, rank,
    COUNT: tl.constexpr, RANK: tl.constexpr, EARLY: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1)
    share = tl.cdiv(tl.cdiv(inner, K), tl.num_programs(1)) * K
    begin = split * share
    end = tl.minimum(begin + share, inner)
    at_rank, at_k = tl.arange(0, RANK), tl.arange(0, K)
    let_next_begin(EARLY)
    if EARLY and tl.program_id(0) == 0 and begin < end:
        for r in range(rank):
            call_up(down0 + r * inner + begin, (end - begin) * 2, EARLY)
            if COUNT > 1:
                call_up(down1 + r * inner + begin, (end - begin) * 2, EARLY)
            if COUNT > 2:
                call_up(down2 + r * inner + begin, (end - begin) * 2, EARLY)
    wait_for_others(EARLY)
    for place in tl.static_range(COUNT):
        down = down0
        if place == 1:
            down = down1
        elif place == 2:
            down = down2
        total = tl.zeros((M, RANK), dtype=tl.float32)
        for k in range(begin, end, K):
            inside = k + at_k < inner
            a = tl.load(
                x + row[:, None] * inner + k + at_k[None, :],
                mask=(row[:, None] < rows) & inside[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                down + at_rank[None, :] * inner + k + at_k[:, None],
                mask=(at_rank[None, :] < rank) & inside[:, None], other=0.0,
            )  # fmt: skip
            total = tl.dot(a, b, total)
        at = ((split * rows + row[:, None]) * COUNT + place) * RANK + at_rank[None, :]
        tl.store(low + at, total, mask=row[:, None] < rows)


class LowRank(NamedTuple):
    """What a product is given of adapters: float32 parts [parts, rows, adapters, padded rank] of
    every x @ down.T, and the rest."""

    low: Tensor
    ups: tuple[Tensor, ...]
    scales: tuple[float, ...]
    rank: int
    padded_rank: int
    parts: int


def low_rank(x: Tensor, adapters: tuple[Adapter, ...], weights: tuple[Tensor, ...]) -> LowRank:
    """Computes x @ down.T of all the adapters. Without any, the weights are in their places, which
    no kernel looks at."""
    if not adapters:
        return LowRank(x, weights, (0.0,) * len(weights), 0, 0, 0)
    rows, inner = x.shape
    rank = adapters[0].down.shape[0]
    # The tensor cores multiply no fewer than 16 columns.
    padded = max(16, triton.next_power_of_2(rank))
    parts = max(1, min(8, inner // 256))
    low = torch.empty(parts, rows, len(adapters), padded, dtype=torch.float32, device=x.device)
    downs = [a.down for a in adapters] + [adapters[0].down] * (3 - len(adapters))
    _low_kernel[(triton.cdiv(rows, 16), parts)](
        x, *downs, low, rows, inner, rank,
        COUNT=len(adapters), RANK=padded, M=16, K=128, num_warps=4, num_stages=3,
        **launch_options(x.device),
    )  # fmt: skip
    ups, scales = tuple(a.up for a in adapters), tuple(a.scale for a in adapters)
    return LowRank(low, ups, scales, rank, padded, parts)


@triton.jit
def _add_low_rank_kernel(
    x, low, up, rows, width, rank, scale,
    RANK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    first_col, row = tl.program_id(0) * N, tl.program_id(1) * M + tl.arange(0, M)
    col = first_col + tl.arange(0, N)
    up_tile = up_tile_of(up, first_col, rank, N, RANK)
    let_next_begin(EARLY)
    wait_for_others(EARLY)
    at = x + row[:, None] * width + col[None, :]
    total = tl.load(at, mask=row[:, None] < rows, other=0.0).to(tl.float32)
    total = plus_low_rank(total, low, up_tile, row, rows, 0, scale, 1, PARTS, M, RANK)
    tl.store(at, total.to(x.dtype.element_ty), mask=row[:, None] < rows)


def add_low_rank(x: Tensor, y: Tensor, adapter: Adapter) -> Tensor:
    """x + scale * y @ down.T @ up.T, written over x."""
    rows, width = x.shape
    added = low_rank(y, (adapter,), ())
    _add_low_rank_kernel[(width // 32, triton.cdiv(rows, 16))](
        x, added.low, *added.ups, rows, width, added.rank, *added.scales,
        RANK=added.padded_rank, PARTS=added.parts, M=16, N=32, num_warps=2,
        **launch_options(x.device),
    )  # fmt: skip
    return x
