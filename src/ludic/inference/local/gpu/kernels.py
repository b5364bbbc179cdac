"""Triton kernels for the decode step: each does in one launch what torch does in three to thirty.

A decode step has a few hundred tokens and is bound by launches, not by arithmetic. The kernels
compute in float32 and round once, where a module rounds after each operation. They read the
trainer's weights where they lie: nothing is packed or copied.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.noise import GOLDEN, MIX_1, MIX_2
from ludic.inference.local.sampler import BELOW_ONE

MAX_PROJECT_ROWS = 256
"""Above this a matrix product is bound by arithmetic, and the vendor's kernels are better."""

_SAMPLE_BLOCK = 2048
_BLOCK_BYTES = 1 << 16
_LOG2_E = tl.constexpr(1.4426950408889634)


# Projections


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


# Rotary embedding and the cache


@triton.jit
def _rotate_store_kernel(
    q, k, v, cos, sin, out, keys, values, slots, positions,
    q_row, k_row, v_row, slot_step, head_step, heads, kv_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
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
    a = tl.load(q + row * q_row + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(q + row * q_row + at + HALF, mask=inside, other=0.0).to(tl.float32)
    where = out + row * heads * DIM + at
    tl.store(where, (a * cos_1 - b * sin_1).to(out.dtype.element_ty), mask=inside)
    tl.store(where + HALF, (b * cos_2 + a * sin_2).to(out.dtype.element_ty), mask=inside)

    head = tl.arange(0, KV)
    inside = (head < kv_heads)[:, None]
    at = head[:, None] * DIM + half[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    place = slot * slot_step + position * DIM + head[:, None] * head_step + half[None, :]
    a = tl.load(k + row * k_row + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(k + row * k_row + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(keys + place, (a * cos_1 - b * sin_1).to(keys.dtype.element_ty), mask=inside)
    tl.store(keys + place + HALF, (b * cos_2 + a * sin_2).to(keys.dtype.element_ty), mask=inside)
    tl.store(values + place, tl.load(v + row * v_row + at, mask=inside), mask=inside)
    tl.store(values + place + HALF, tl.load(v + row * v_row + at + HALF, mask=inside), mask=inside)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Rotated queries; rotated keys, and values, written to `cache[slot, :, position]`.

    q is [rows, heads, dim], k and v [rows, kv_heads, dim], each dense in its last two; cos and sin
    are [rows, dim]; a cache is [slots, kv_heads, length, dim].
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    cos, sin = rotary
    keys, values = cache
    out = q.new_empty(rows, heads, dim)
    _rotate_store_kernel[(rows,)](
        q, k, v, cos, sin, out, keys, values, slots, positions,
        q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), heads, kv_heads,
        DIM=dim, HEADS=triton.next_power_of_2(heads), KV=triton.next_power_of_2(kv_heads),
        num_warps=4,
    )  # fmt: skip
    return out


# Attention of one token per row


@triton.jit
def _attend_kernel(
    q, keys, values, positions, out, slot_step, head_step, kv_heads, scale, window,
    GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    begin = 0
    if window > 0:
        begin = tl.maximum(length - window, 0)
    member, dim = tl.arange(0, PADDED), tl.arange(0, DIM)
    mine = (row * kv_heads + head) * GROUP * DIM + member[:, None] * DIM + dim[None, :]
    inside = (member < GROUP)[:, None]
    queries = tl.load(q + mine, mask=inside, other=0.0)
    base = row * slot_step + head * head_step
    most = tl.full((PADDED,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((PADDED,), dtype=tl.float32)
    result = tl.zeros((PADDED, DIM), dtype=tl.float32)
    for start in range(begin // BLOCK * BLOCK, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = (at >= begin) & (at < length)
        places = base + at[:, None] * DIM + dim[None, :]
        block = tl.load(keys + places, mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(block), input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weights, 1)
        block = tl.load(values + places, mask=seen[:, None], other=0.0)
        result = tl.dot(
            weights.to(block.dtype), block, result * shrink[:, None], input_precision=PRECISION
        )
        most = higher
    tl.store(out + mine, (result / total[:, None]).to(out.dtype.element_ty), mask=inside)


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """Row r's queries [heads, dim] over the first `positions[r] + 1` tokens of slot r."""
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(q)
    # Few programs want long strides through their slots; many hide each other's waiting.
    block = 64 if rows * kv_heads > 128 or dim > 128 else 128
    # Several blocks of keys and values lie in shared memory at a time.
    block = min(block, _BLOCK_BYTES // (2 * dim * q.element_size()))
    _attend_kernel[(rows, kv_heads)](
        q, keys, values, positions, out, keys.stride(0), keys.stride(1), kv_heads, scale,
        window or 0,
        GROUP=group, PADDED=max(16, triton.next_power_of_2(group)), DIM=dim, BLOCK=block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


# Sampling


@triton.jit
def _block_sums_kernel(
    logits, inverse_temperature, most, sums, vocab, row_step, blocks, BLOCK: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_step + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = x * tl.load(inverse_temperature + row)
    highest = tl.max(x, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(most + row * blocks + block, highest)
    # NaN, or infinity less infinity, makes the sum NaN, and so the log-prob.
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(x - highest), 0))


@triton.jit
def _uniform(key, position, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
    x = (key + (position + 1) * GOLDEN).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * tl.full((), MIX_1, tl.int64).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 27)) * tl.full((), MIX_2, tl.int64).to(tl.uint64, bitcast=True)
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _draw_kernel(
    logits, inverse_temperature, most, sums, keys, at_token, live, ids, positions, tokens, logprobs,
    vocab, row_step, blocks, BELOW_ONE: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr,
    MIX_2: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.load(at_token + row)
    uniform = _uniform(tl.load(keys + row), step, GOLDEN, MIX_1, MIX_2) * BELOW_ONE

    # Which block
    index = tl.arange(0, BLOCKS)
    real = index < blocks
    highs = tl.load(most + row * blocks + index, mask=real, other=float("-inf"))
    highest = tl.max(highs, 0)
    parts = tl.load(sums + row * blocks + index, mask=real, other=0.0) * tl.exp(highs - highest)
    parts = parts.to(tl.float64)
    upto = tl.cumsum(parts, 0)
    total = tl.sum(parts, 0)
    target = uniform * total
    block = tl.minimum(tl.sum((real & (upto <= target)).to(tl.int32), 0), blocks - 1)
    size = tl.sum(tl.where(index == block, parts, 0.0), 0)
    before = tl.sum(tl.where(index < block, parts, 0.0), 0)
    fraction = tl.minimum(tl.maximum((target - before) / size, 0.0), BELOW_ONE)

    # Which token in it
    inner = tl.arange(0, BLOCK)
    at = block * BLOCK + inner
    x = tl.load(logits + row * row_step + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = x * tl.load(inverse_temperature + row)
    weights = tl.exp(x - highest).to(tl.float64)
    upto_inner = tl.cumsum(weights, 0)
    found = tl.sum((upto_inner <= fraction * tl.sum(weights, 0)).to(tl.int32), 0)
    found = tl.minimum(found, tl.minimum(BLOCK, vocab - block * BLOCK) - 1)
    chosen = tl.sum(tl.where(inner == found, x, 0.0), 0)

    token = (block * BLOCK + found).to(tl.int64)
    logprob = chosen - highest - tl.log(total.to(tl.float32))
    moving = tl.load(live + row)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, tl.where(total == total, logprob, float("nan")))
    tl.store(ids + row, token * moving)
    tl.store(positions + row, tl.load(positions + row) + moving)
    tl.store(at_token + row, step + moving)


def draw_and_carry_on(logits: Tensor, batch: Any, rows: int) -> None:
    """Samples a token for each of the batch's first `rows` slots and makes it the next input."""
    vocab = logits.shape[1]
    blocks = triton.cdiv(vocab, _SAMPLE_BLOCK)
    most = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(most)
    _block_sums_kernel[(rows, blocks)](
        logits, batch.inverse_temperature, most, sums, vocab, logits.stride(0), blocks,
        BLOCK=_SAMPLE_BLOCK, num_warps=8,
    )  # fmt: skip
    _draw_kernel[(rows,)](
        logits, batch.inverse_temperature, most, sums, batch.keys, batch.at, batch.live, batch.ids,
        batch.positions, batch.tokens, batch.logprobs, vocab, logits.stride(0), blocks,
        BELOW_ONE=BELOW_ONE, GOLDEN=GOLDEN, MIX_1=MIX_1, MIX_2=MIX_2,
        BLOCKS=triton.next_power_of_2(blocks), BLOCK=_SAMPLE_BLOCK, num_warps=8,
    )  # fmt: skip
