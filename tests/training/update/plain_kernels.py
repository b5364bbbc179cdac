"""What the trainer's Triton kernels compute for a layer, in plain torch: on any device and type."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LowRank(NamedTuple):
    rows: Tensor
    columns: Tensor
    scale: float


def plus(matrix: Tensor, low_rank: LowRank | None) -> Tensor:
    if low_rank is None:
        return matrix
    return matrix + low_rank.scale * low_rank.rows @ low_rank.columns.t()


def norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x if y is None else x + y
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    scales = torch.rsqrt(wide.square().mean(1) + eps)
    return (wide * scales[:, None] * weight).to(x.dtype), scales, total


def norm_gradient(
    grad: Tensor, through: Tensor | None, x: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    unit = x.to(scales.dtype) * scales[:, None]
    for_weight = (grad * unit).sum(0).to(weight.dtype)
    inner = grad * weight.to(scales.dtype)
    result = (inner - unit * (inner * unit).mean(1, keepdim=True)) * scales[:, None]
    return (result if through is None else result + through).to(x.dtype), for_weight


def gated(
    gate: Tensor, up: Tensor, to_gate: LowRank | None = None, to_up: LowRank | None = None
) -> Tensor:
    return F.silu(plus(gate, to_gate)) * plus(up, to_up)


def gated_gradient(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    to_gate: LowRank | None = None,
    to_up: LowRank | None = None,
    to_grad: LowRank | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, grad = plus(gate, to_gate), plus(up, to_up), plus(grad, to_grad)
    share = torch.sigmoid(gate)
    silu = gate * share
    return silu * up, grad * up * (share + silu * (1 - share)), grad * silu


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    if back:
        first, second = (x * sin).chunk(2, -1)
        return x * cos + torch.cat([second, -first], -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
