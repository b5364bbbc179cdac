"""Triton kernels of the trainer: over a chunk of logits, and between a layer's products (norms,
rotations, the gate).

Each reads its tensors once, where torch and the families' own code make up to ten passes; those of
a layer round once, as the engine's do. They compile in about a second and Triton caches them on
disk. torch.compile's version of the same formulas is as fast, but costs a short run more time than
it saves.
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
_LOGITS_BLOCK = 4096
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
def _reduce_kernel(
    logits, scales, mask, targets, lses, logprobs, entropies, vocab,
    MASKED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    base = row * vocab
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + base + at, mask=at < vocab, other=float("-inf")) * scale
        if MASKED:
            cut = tl.load(mask + base + at, mask=at < vocab, other=1)
            x = tl.where(cut != 0, float("-inf"), x)
        higher = tl.maximum(most, tl.max(x, 0))
        offset = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(most - offset)
        share = tl.exp(x - offset)
        total = total * shrink + tl.sum(share, 0)
        if ENTROPY:
            # 0 * inf would be NaN
            weighted = weighted * shrink + tl.sum(share * tl.where(share == 0, 0.0, x), 0)
        most = higher
    lse = most + tl.log(total)
    target = tl.load(targets + row)
    chosen = tl.load(logits + base + target) * scale
    if MASKED:
        chosen = tl.where(tl.load(mask + base + target) != 0, float("-inf"), chosen)
    tl.store(lses + row, lse)
    tl.store(logprobs + row, chosen - lse)
    if ENTROPY:
        tl.store(entropies + row, lse - weighted / total)


@_where_the_tensors_are
def reduce(
    logits: Tensor, scales: Tensor, mask: Tensor | None, targets: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normaliser, log-prob and entropy (zero where not asked for) of each row."""
    rows, vocab = logits.shape
    lses, logprobs = torch.empty_like(scales), torch.empty_like(scales)
    entropies = torch.zeros_like(scales)
    cut = logits if mask is None else mask.view(torch.uint8)
    if rows:
        _reduce_kernel[(rows,)](
            logits.contiguous(), scales.contiguous(), cut, targets.contiguous(), lses, logprobs,
            entropies, vocab, MASKED=mask is not None, ENTROPY=entropy, BLOCK=_LOGITS_BLOCK,
            num_warps=8,
        )  # fmt: skip
    return lses, logprobs, entropies


@triton.jit
def _gradient_kernel(
    logits, scales, mask, targets, lses, entropies, grad_logprobs, grad_entropies, out, vocab,
    MASKED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < vocab
    scale, grad = tl.load(scales + row), tl.load(grad_logprobs + row)
    place = row * vocab + at
    logp = tl.load(logits + place, mask=real, other=0.0) * scale - tl.load(lses + row)
    probs = tl.exp(logp)
    if MASKED:
        probs = tl.where(tl.load(mask + place, mask=real, other=1) != 0, 0.0, probs)
    factor = -grad
    if ENTROPY:
        factor = -grad - (logp + tl.load(entropies + row)) * tl.load(grad_entropies + row)
    hit = tl.where(at == tl.load(targets + row), grad, 0.0)
    tl.store(out + place, ((probs * factor + hit) * scale).to(out.dtype.element_ty), mask=real)


@_where_the_tensors_are
def logit_gradient(
    logits: Tensor,
    scales: Tensor,
    mask: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient for the head's output, in `dtype`, from those of log-prob and entropy."""
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=dtype, device=logits.device)
    cut = logits if mask is None else mask.view(torch.uint8)
    grad = grad_logprobs.contiguous()
    more = grad if grad_entropies is None else grad_entropies.contiguous()
    if rows:
        _gradient_kernel[(rows, triton.cdiv(vocab, _LOGITS_BLOCK))](
            logits.contiguous(), scales.contiguous(), cut, targets.contiguous(), lse.contiguous(),
            entropies.contiguous(), grad, more, out, vocab, MASKED=mask is not None,
            ENTROPY=grad_entropies is not None, BLOCK=_LOGITS_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


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
