"""What adapters add to products: `scale * x @ down.T @ up.T`.

x @ down.T is a launch of its own, shared by all projections with the same x. The product adds the
rest at its end, so it can start at the same time and wait for x @ down.T only there. Computing
x @ down.T in each program that needs it would save the launch, but is slower for large weights.
"""

from __future__ import annotations

from typing import NamedTuple

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

BESIDE = True
"""Whether a product begins beside its adapters' first one, or after it, which takes 9 to 15 % more
of a step: `benchmarks.decode` measures both."""


@triton.jit
def up_tile_of(up, col, rank, RANK: tl.constexpr):
    """The columns `col` of up.T, [RANK, columns]; zero beyond the rank."""
    at_rank = tl.arange(0, RANK)
    at = up + col[None, :] * rank + at_rank[:, None]
    return tl.load(at, mask=at_rank[:, None] < rank, other=0.0)


@triton.jit
def plus_low_rank(total, low, up_tile, row, rows, place, RANK: tl.constexpr):
    """total + low[place] @ up.T."""
    at = (place * rows + row[:, None]) * RANK + tl.arange(0, RANK)[None, :]
    # Into the sum that is there: another one would not fit into the registers.
    return tl.dot(tl.load(low + at, mask=row[:, None] < rows, other=0.0), up_tile, total)


@triton.jit
def _low_kernel(
    x, down0, down1, down2, low, rows, inner, share, rank, scale0, scale1, scale2,
    RANK: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, part, place = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1), tl.program_id(2)
    down, scale = down0, scale0
    if place == 1:
        down, scale = down1, scale1
    elif place == 2:
        down, scale = down2, scale2
    begin = part * share
    end = tl.minimum(begin + share, inner)
    if not BESIDE:
        let_next_begin(EARLY)
    if EARLY and tl.program_id(0) == 0 and begin < end:
        for r in range(rank):
            call_up(down + r * inner + begin, (end - begin) * 2, EARLY)
    wait_for_others(EARLY)
    if BESIDE:
        # Only now: the product reads x before it waits for this kernel, so x has to be there.
        let_next_begin(EARLY)
    at_rank, at_k = tl.arange(0, RANK), tl.arange(0, K)
    total = tl.zeros((M, RANK), dtype=tl.float32)
    for k in range(begin, end, K):
        inside = k + at_k < end
        a = tl.load(
            x + row[:, None] * inner + k + at_k[None, :],
            mask=(row[:, None] < rows) & inside[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            down + at_rank[None, :] * inner + k + at_k[:, None],
            mask=(at_rank[None, :] < rank) & inside[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total)
    at = ((part * tl.num_programs(2) + place) * rows + row[:, None]) * RANK + at_rank[None, :]
    tl.store(low + at, (total * scale).to(low.dtype.element_ty), mask=row[:, None] < rows)


class LowRank(NamedTuple):
    """What a product is given of adapters: scale * x @ down.T of each, [adapters, rows, padded
    rank], and the rest. Where the sum is cut into parts there is one for each part of the sum."""

    low: Tensor
    ups: tuple[Tensor, ...]
    rank: int
    padded_rank: int
    beside: bool


def low_rank(
    x: Tensor, adapters: tuple[Adapter, ...], weights: tuple[Tensor, ...], share: int = 0
) -> LowRank:
    """Computes x @ down.T of all the adapters, in parts of `share` terms if that is not 0. Without
    any, the weights are in their places, which no kernel looks at."""
    if not adapters:
        return LowRank(x, weights, 0, 0, False)
    rows, inner = x.shape
    rank, count = adapters[0].down.shape[0], len(adapters)
    # The tensor cores multiply no fewer than 16 columns.
    padded = max(16, triton.next_power_of_2(rank))
    share = share or inner
    parts = triton.cdiv(inner, share)
    low = x.new_empty(parts * count, rows, padded)
    filled = adapters + adapters[:1] * (3 - count)
    # Its memory must leave room for the product's on the same processor.
    _low_kernel[(triton.cdiv(rows, 16), parts, count)](
        x, *(a.down for a in filled), low, rows, inner, share, rank, *(a.scale for a in filled),
        RANK=padded, BESIDE=BESIDE, M=16, K=128, num_warps=4, num_stages=3,
        **launch_options(x.device),
    )  # fmt: skip
    return LowRank(low, tuple(a.up for a in adapters), rank, padded, BESIDE)


@triton.jit
def _add_low_rank_kernel(
    x, low, up, rows, width, rank, parts,
    RANK: tl.constexpr, EARLY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.program_id(1) * M + tl.arange(0, M)
    up_tile = up_tile_of(up, col, rank, RANK)
    let_next_begin(EARLY)
    wait_for_others(EARLY)
    at = x + row[:, None] * width + col[None, :]
    total = tl.load(at, mask=row[:, None] < rows, other=0.0).to(tl.float32)
    for part in range(parts):
        total = plus_low_rank(total, low, up_tile, row, rows, part, RANK)
    tl.store(at, total.to(x.dtype.element_ty), mask=row[:, None] < rows)


def add_low_rank(x: Tensor, y: Tensor, adapter: Adapter) -> Tensor:
    """x + scale * y @ down.T @ up.T, written over x."""
    rows, width = x.shape
    added = low_rank(y, (adapter,), (), share=2048)
    _add_low_rank_kernel[(width // 32, triton.cdiv(rows, 16))](
        x, added.low, *added.ups, rows, width, added.rank, len(added.low),
        RANK=added.padded_rank, M=16, N=32, num_warps=2,
        **launch_options(x.device),
    )  # fmt: skip
    return x
