"""Draws a token for each row and makes it the next input."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.sampler import BELOW_ONE
from ludic.seeding import GOLDEN, MIX_1, MIX_2

_SAMPLE_BLOCK = 2048


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
