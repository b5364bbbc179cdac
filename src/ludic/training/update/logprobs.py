"""Log-probs of action tokens without whole logits.

Only the hidden states that predict an action go through the head, a chunk at a time. The backward
pass recomputes each chunk's logits, except for those that there is room to keep, so that no more
than one recomputed chunk is held at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludic.memory.update import chunk_tokens
from ludic.plumbing.model_parts import LogitRule
from ludic.training.config import HeadKernels
from ludic.training.update.packing import KeptIds

_log = logging.getLogger("ludic.training")
TokenValues: TypeAlias = tuple[Tensor, Tensor | None]
"""Log-probs and, where asked, entropies of a run of tokens."""


def token_logprobs(
    hidden: Float[Tensor, "tokens width"],
    head: nn.Module,
    targets: Int[Tensor, " tokens"],
    temperatures: Float[Tensor, " tokens"],
    *,
    kept: KeptIds | None = None,
    rule: LogitRule | None = None,
    entropy: bool = False,
    chunk: int | None = None,
    narrow: torch.dtype | None = None,
    kernels: HeadKernels = "auto",
    keep_logits: int = 0,
) -> TokenValues:
    """The log-prob of each target under softmax(head(hidden) / temperature), in float32.

    Where `kept` lists ids for a token, the softmax is over those alone. With `entropy`, the
    entropy of the same distribution, from the same pass; both carry gradients. With `narrow`, the
    head multiplies in that type; its logits are float32 in any case. A head of one matrix keeps
    the logits of up to `keep_logits` tokens, in whole chunks, for the backward pass.
    """
    rule = rule or LogitRule()
    hidden = hidden if narrow is None else hidden.to(narrow)
    vocab = int(getattr(head, "out_features", 2**17))
    chunk = chunk or chunk_tokens(vocab, hidden.shape[1], hidden.device.type)
    if type(head) is nn.Linear and rule.softcap is None:
        keep = keep_logits if torch.is_grad_enabled() else 0
        scales = rule.scale / temperatures.to(_wide(hidden.dtype))
        logprobs, entropies = _FusedLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, scales, kept, entropy, chunk, kernels, keep
        )
        return logprobs, entropies if entropy else None

    # Logits that are more than one product: LoRA on the head, a soft cap.
    def score(part: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        logits = rule(_wide_logits(part, head))
        mask = _mask(kept, start, end, logits.shape[1])
        scales = 1.0 / temperatures[start:end]
        return _reduce(logits, scales, mask, targets[start:end], entropy)[1:]

    parts = [
        checkpoint(score, hidden[start:end], start, end, use_reentrant=False)
        for start, end in _ranges(len(hidden), chunk)
    ]
    empty = hidden.new_zeros(0, dtype=_wide(hidden.dtype))
    logprobs = torch.cat([empty, *(p[0] for p in parts)])
    return logprobs, torch.cat([empty, *(p[1] for p in parts)]) if entropy else None


def action_logits(
    hidden: Float[Tensor, "tokens width"],
    head: nn.Module,
    temperatures: Float[Tensor, " tokens"],
    *,
    kept: KeptIds | None = None,
    rule: LogitRule | None = None,
    narrow: torch.dtype | None = None,
) -> Float[Tensor, "tokens vocab"]:
    """The whole logits that the log-probs are a softmax of, for losses that ask for them."""
    hidden = hidden if narrow is None else hidden.to(narrow)
    logits = (rule or LogitRule())(_wide_logits(hidden, head)) / temperatures[:, None]
    mask = _mask(kept, 0, hidden.shape[0], logits.shape[1])
    return logits if mask is None else logits.masked_fill(mask, -torch.inf)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _mask(kept: KeptIds | None, start: int, end: int, vocab: int) -> Tensor | None:
    """True where an id was cut from the distribution of tokens `start` to `end`."""
    if kept is None:
        return None
    ids, offsets = kept.ids, kept.offsets
    counts = offsets[start + 1 : end + 1] - offsets[start:end]
    rows = torch.repeat_interleave(torch.arange(end - start, device=ids.device), counts)
    mask = torch.ones(end - start, vocab, dtype=torch.bool, device=ids.device)
    mask[rows, ids[offsets[start] : offsets[end]]] = False
    return mask & (counts > 0)[:, None]


def _reduce(
    logits: Tensor, scales: Tensor, mask: Tensor | None, targets: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normaliser, log-prob and entropy of each row of the head's output."""
    logits = logits * scales[:, None]
    if mask is not None:
        logits.masked_fill_(mask, -torch.inf)
    logp = logits.log_softmax(dim=1)
    logprobs = logp.gather(1, targets[:, None]).squeeze(1)
    lse = logits.amax(1) - logp.amax(1)
    if not entropy:
        return lse, logprobs, torch.zeros_like(lse)
    probs = logp.exp()
    if mask is not None:
        logp = logp.masked_fill_(mask, 0.0)  # 0 * inf would be NaN
    return lse, logprobs, -probs.mul_(logp).sum(1)


def _logit_gradient(
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
    logp = torch.addcmul(-lse[:, None], logits, scales[:, None])
    probs = logp.exp()
    if mask is not None:
        probs.masked_fill_(mask, 0.0)
    gradient = grad_logprobs * scales
    if grad_entropies is None:
        probs.mul_(-gradient[:, None])
    else:
        slope = logp.add_(entropies[:, None]).mul_((grad_entropies * scales)[:, None])
        probs.mul_(-gradient[:, None] - slope)
    return probs.scatter_add_(1, targets[:, None], gradient[:, None]).to(dtype)


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _kernel(plain: Callable[..., Any], scales: Tensor, how: HeadKernels) -> Callable[..., Any]:
    """`_reduce` or `_logit_gradient` as a GPU is to compute it: the many passes of plain torch over
    a chunk of logits cost as much as the head itself."""
    if not scales.is_cuda or scales.dtype != torch.float32 or how == "eager":
        return plain
    if how == "compiled":
        return _fused(plain)
    if how == "triton" or triton_works(scales.device):
        from ludic.training.update import kernels

        return getattr(kernels, plain.__name__[1:])  # type: ignore[no-any-return]
    return plain


@cache
def triton_works(device: torch.device) -> bool:
    """Whether a kernel can be compiled here: Triton needs a C compiler, which not all have."""
    try:
        from ludic.training.update import kernels

        one = torch.ones(1, device=device)
        kernels.reduce(one[None], one, None, torch.zeros_like(one, dtype=torch.long), False)
    except Exception as exc:
        _log.warning(
            "Triton cannot compile a kernel here (%s: %s): log-probs are computed by plain torch, "
            "which takes longer. It needs a C compiler, such as gcc",
            type(exc).__name__,
            exc,
        )
        return False
    return True


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the result in `dtype`; a GPU never rounds it to the inputs' type."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_matmul(
    total: Float[Tensor, "rows columns"] | None,
    a: Float[Tensor, "rows inner"],
    b: Float[Tensor, "inner columns"],
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Float[Tensor, "rows columns"]:
    """total + scale · a @ b, in place and in `dtype`; a GPU's product adds to the sum by itself."""
    if total is None:
        product = _matmul(a, b, dtype)
        return product if scale == 1.0 else product.mul_(scale)
    if not a.is_cuda:
        return total.add_(_matmul(a, b, dtype), alpha=scale)
    if a.dtype == dtype:
        return torch.addmm(total, a, b, alpha=scale, out=total)
    return torch.addmm(total, a, b, out_dtype=dtype, alpha=scale, out=total)


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scales: Tensor,
        kept: KeptIds | None,
        entropy: bool,
        chunk: int,
        kernels: HeadKernels,
        keep_logits: int,
    ) -> tuple[Tensor, Tensor]:
        reduce, matrix = _kernel(_reduce, scales, kernels), weight.to(hidden.dtype)
        ctx.logits = {}

        def logits_of(start: int, end: int) -> Tensor:
            logits = _chunk_logits(hidden[start:end], matrix, bias, scales.dtype)
            if end <= keep_logits:
                ctx.logits[start] = logits
            return logits

        parts = [
            reduce(
                logits_of(start, end),
                scales[start:end],
                _mask(kept, start, end, len(weight)),
                targets[start:end],
                entropy,
            )
            for start, end in _ranges(len(hidden), chunk)
        ]
        lse, logprobs, entropies = (
            torch.cat([scales.new_zeros(0), *(part[i] for part in parts)]) for i in range(3)
        )
        ctx.save_for_backward(hidden, weight, bias, targets, scales, lse, entropies)
        ctx.chunk, ctx.kept, ctx.kernels = chunk, kept, kernels
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> Any:
        hidden, weight, bias, targets, scales, lse, entropies = ctx.saved_tensors
        gradient, wide = _kernel(_logit_gradient, scales, ctx.kernels), scales.dtype
        matrix = weight.to(hidden.dtype)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = grad_bias = None
        for start, end in _ranges(len(hidden), ctx.chunk):
            part = slice(start, end)
            grad = gradient(
                ctx.logits.pop(start)
                if start in ctx.logits
                else _chunk_logits(hidden[part], matrix, bias, wide),
                scales[part],
                _mask(ctx.kept, start, end, len(weight)),
                targets[part],
                lse[part],
                entropies[part],
                grad_logprobs[part],
                None if grad_entropies is None else grad_entropies[part],
                hidden.dtype,
            )
            if needs_bias:
                total = grad.sum(0, dtype=wide)
                grad_bias = total if grad_bias is None else grad_bias + total
            if grad_hidden is not None:
                torch.mm(grad, matrix, out=grad_hidden[part])
            if needs_weight:
                grad_weight = add_matmul(grad_weight, grad.t(), hidden[part], wide)
            del grad  # or it would be there beside the next chunk's
        if needs_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight
            grad_weight = grad_weight.to(weight.dtype)
        if needs_bias and grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


def _ranges(total: int, chunk: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk, total)) for start in range(0, total, chunk)]


def _chunk_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    logits = _matmul(hidden, weight.t(), dtype)
    return logits if bias is None else logits.add_(bias)


class _WideLinear(torch.autograd.Function):
    """A linear layer whose result is not rounded to its inputs' type."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _chunk_logits(hidden, weight.to(hidden.dtype), bias, _wide(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        narrow, wide = grad.to(hidden.dtype), grad.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            narrow @ weight.to(hidden.dtype) if needs_hidden else None,
            _matmul(narrow.t(), hidden, wide).to(weight.dtype) if needs_weight else None,
            grad.sum(0).to(ctx.bias_dtype) if needs_bias else None,
        )


def _wide_logits(hidden: Tensor, head: nn.Module) -> Tensor:
    """The head's output in float32 at least, rounded on the way only by a head that is more than
    one matrix."""
    wide = _wide(hidden.dtype)
    if type(head) is nn.Linear and (hidden.dtype, head.weight.dtype) != (wide, wide):
        return _WideLinear.apply(hidden, head.weight, head.bias)  # type: ignore[no-any-return, no-untyped-call]
    first = next(head.parameters(), hidden)
    if first.dtype == hidden.dtype:
        return head(hidden).to(wide)  # type: ignore[no-any-return]
    with torch.autocast(hidden.device.type, hidden.dtype):
        return head(hidden).to(wide)  # type: ignore[no-any-return]
