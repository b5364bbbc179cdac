"""Checksums of tensors that are the same number on every device, in any order of summation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
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
    """The tensor's size in bytes plus Σ wᵢ·(2i+1) over its 8-byte words, mod 2⁶⁴.

    A changed word always changes it, since odd numbers have inverses; exchanged words do, since
    their factors differ. It tells accidents, not forgeries. Stays on the device.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = _as_words(flat[:whole])
    if whole < flat.numel():  # short of a word: zeros to the end
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: flat.numel() - whole] = flat[whole:]
        words = torch.cat([words, tail.view(torch.int64)])
    if words.device.type == "cpu":
        return torch.tensor(_sum_on_cpu(words.numpy(), flat.numel()), dtype=torch.int64)
    return _sum_on_gpu(words, flat.numel())


@torch.no_grad()
def not_finite(pairs: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those that hold a NaN or an infinity."""
    floating = [(name, tensor) for name, tensor in pairs if tensor.is_floating_point()]
    # A sum is one quick pass, and finite only where every element is; it may overflow by itself.
    sums = [tensor.sum().float() for _, tensor in floating]
    if len({total.device for total in sums}) == 1:
        sums = list(torch.stack(sums).cpu())  # one wait for the device, not one per tensor
    suspects = [pair for pair, total in zip(floating, sums, strict=True) if not total.isfinite()]
    return [name for name, tensor in suspects if not bool(torch.isfinite(tensor).all())]


def _sum_on_cpu(words: NDArray[np.int64], total: int) -> int:
    """The weighted sum in one pass of one thread: torch's threads wait for each other at every
    step, which costs more than the sum where the machine is busy."""
    odd = _odd_numbers(torch.device("cpu")).numpy()
    for start in range(0, words.size, _CHUNK):
        chunk = words[start : start + _CHUNK]
        total += int(np.dot(chunk, odd[: chunk.size])) + 2 * start * int(chunk.sum())
    return (total + 2**63) % 2**64 - 2**63


def _sum_on_gpu(words: Tensor, total: int) -> Tensor:
    """The same without leaving the device: torch's integers wrap around as well."""
    odd = _odd_numbers(words.device)
    found = torch.full((), total, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        found = found + (chunk * odd[: chunk.numel()]).sum() + 2 * start * chunk.sum()
    return found


def _as_words(flat: Tensor) -> Tensor:
    if flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> Tensor:
    return 2 * torch.arange(_CHUNK, dtype=torch.int64, device=device) + 1
