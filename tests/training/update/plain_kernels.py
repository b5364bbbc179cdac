"""What the trainer's Triton kernels compute for a layer, in plain torch: on any device and type."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gated_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
