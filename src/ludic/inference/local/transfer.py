"""Small tables of numbers, from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | NDArray[Any],
    device: torch.device,
    dtype: torch.dtype = torch.long,
) -> Tensor:
    """The values as a tensor; on a GPU without waiting for the copy, or for the work before it."""
    host = torch.as_tensor(values, dtype=dtype)
    return host if device.type != "cuda" else host.pin_memory().to(device, non_blocking=True)
