"""Which numbers of rows give the same bits on this machine.

A linear layer's result for a row may depend on how many rows are computed with it, since the
library picks its kernel by the shape. It does not depend on what the other rows hold. So a few
sizes are tried when an engine is made, and those that agree to the last bit may be mixed.
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
    """Those of `sizes` whose rows are the same bits as in the largest, wherever they stand.

    Raises `ConfigError` when not even one size gives the same bits at any place in the batch.
    """
    largest = max(sizes)
    ids = (torch.arange(largest, device=device) * 7919) % vocab
    at = (torch.arange(largest, device=device) * 31) % max_position
    wanted = _logits(forward, ids, at)
    turned = _logits(forward, ids.roll(5), at.roll(5)).roll(-5, 0)
    if not _same(wanted, turned):
        raise ConfigError(
            "on this machine a row's bits depend on its place in the batch, so the deterministic "
            "mode cannot be promised: set deterministic=False"
        )
    return tuple(n for n in sizes if _same(_logits(forward, ids[:n], at[:n]), wanted[:n]))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _logits(forward: Forward, ids: Tensor, at: Tensor) -> Tensor:
    # The sampler's reductions are part of what must agree.
    return F.softmax(forward(ids[None], at[None], _OwnKeyLayout()).float(), -1)
