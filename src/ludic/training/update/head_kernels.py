"""Triton kernels of the trainer over a chunk of logits.

Each reads them once, where plain torch makes up to ten passes. They compile in about a second and
Triton keeps them on disk; what torch.compile makes of the same formulas is as fast, but costs a
short run more time than it spares.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOGITS_BLOCK = 4096


P = ParamSpec("P")
R = TypeVar("R")


def where_the_tensors_are(launch: Callable[P, R]) -> Callable[P, R]:
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


@where_the_tensors_are
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


@where_the_tensors_are
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
