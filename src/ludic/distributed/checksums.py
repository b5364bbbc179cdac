"""Checksums of tensors that are the same number on every device, in any order of summation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_CHUNK = 1 << 20


def checksums(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """A 64-bit checksum of each tensor's bytes, by name. One synchronisation per device."""
    names: list[str] = []
    sums: list[Tensor] = []
    for name, tensor in pairs:
        names.append(name)
        sums.append(checksum(tensor))
    if not sums:
        return {}
    devices = {s.device for s in sums}
    if len(devices) == 1:
        return dict(zip(names, torch.stack(sums).tolist(), strict=True))
    return {name: int(s.item()) for name, s in zip(names, sums, strict=True)}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Σ wᵢ·(2i+1) mod 2⁶⁴ over the 8-byte words of the tensor: a changed word always changes it,
    since odd numbers have inverses, and so does an exchange of two that differ by more than their
    places can hide. Stays on the device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = _as_words(flat[:whole])
    if whole < flat.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: flat.numel() - whole] = flat[whole:]
        words = torch.cat([words, tail.view(torch.int64)])
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    odd = _odd_numbers(flat.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        total = total + (chunk * odd[: chunk.numel()]).sum() + 2 * start * chunk.sum()
    return total


@torch.no_grad()
def not_finite(pairs: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those that hold a NaN or an infinity."""
    names: list[str] = []
    flags: list[Tensor] = []
    for name, tensor in pairs:
        if tensor.is_floating_point():
            names.append(name)
            # A sum is one pass; it is not finite where an element is not, or where it overflows,
            # which float64 does not.
            flags.append(torch.isfinite(tensor.sum(dtype=torch.float64)).cpu())
    return [name for name, ok in zip(names, flags, strict=True) if not bool(ok)]


def _as_words(flat: Tensor) -> Tensor:
    if flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> Tensor:
    return 2 * torch.arange(_CHUNK, dtype=torch.int64, device=device) + 1
