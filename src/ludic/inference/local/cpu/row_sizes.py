"""Which numbers of rows give the same bits on this machine.

A linear layer's result for a row may depend on how many rows are computed with it, since the
library picks its kernel by the shape. So a few sizes are tried when an engine is made, and those
that agree to the last bit may be mixed. What the other rows hold must not matter: it does in a
mixture of experts, where an expert computes as many rows as chose it, and that is looked for too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.errors import ConfigError
from ludic.inference.local.attention import AttentionCall
from ludic.inference.local.forward import Forward

_LARGEST = ((2_000_000, 1024), (20_000_000, 256))
"""Up to so many parameters, steps of so many rows; larger models are as quick with 64."""
_FEW = 3
"""Rows amid padding: so few that most experts which they choose are theirs alone."""


class _OwnKeyLayout:
    """Every row attends to itself alone: whatever else a model does is then seen row by row."""

    def attend(self, call: AttentionCall) -> Tensor:
        q, v = call.q, call.v
        group = q.shape[1] // v.shape[1]
        return v.repeat_interleave(group, 1) + 0.001 * q


def candidate_sizes(parameters: int, max_slots: int) -> tuple[int, ...]:
    """Sizes worth trying: small ones for few requests, large ones for prompts."""
    largest = next((rows for size, rows in _LARGEST if parameters <= size), 64)
    return tuple(sorted({16, 64, min(256, largest), largest, max(16, -(-max_slots // 16) * 16)}))


@torch.inference_mode()
def equal_row_sizes(
    forward: Forward, sizes: tuple[int, ...], vocab: int, max_position: int, device: torch.device
) -> tuple[int, ...]:
    """Those of `sizes` whose rows are the same bits as in the largest, wherever they stand and
    whatever the other rows hold.

    Raises `ConfigError` when not even one size gives the same bits at any place in the batch, or
    when a row's bits depend on the others.
    """
    largest = max(sizes)
    ids = (torch.arange(largest, device=device) * 7919) % vocab
    at = (torch.arange(largest, device=device) * 31) % max_position
    wanted = _logits(forward, ids, at)
    turned = _logits(forward, ids.roll(5), at.roll(5)).roll(-5, 0)
    if not _same(wanted, turned):
        raise _not_promised("on this machine a row's bits depend on its place in the batch")
    smaller = [n for n in sizes if n < largest]
    equal = [n for n in smaller if _same(_logits(forward, ids[:n], at[:n]), wanted[:n])]
    equal.append(largest)
    for n in equal:
        few = torch.arange(1, n, max(1, n // _FEW), device=device)[:_FEW]
        alone, alone_at = torch.zeros_like(ids[:n]), torch.zeros_like(at[:n])
        alone[few], alone_at[few] = ids[few], at[few]
        if not _same(_logits(forward, alone, alone_at)[few], wanted[few]):
            raise _not_promised(
                "a row's bits depend on the rows computed with it, as in a mixture of experts"
            )
    return tuple(equal)


def _not_promised(why: str) -> ConfigError:
    return ConfigError(
        f"{why}, so the deterministic mode cannot be promised: set deterministic=False"
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _logits(forward: Forward, ids: Tensor, at: Tensor) -> Tensor:
    # The sampler's reductions are part of what must agree.
    return F.softmax(forward(ids[None], at[None], _OwnKeyLayout()).float(), -1)
