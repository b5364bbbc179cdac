"""Checksums of tensors that are equal on every device and in any order of summation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import PublishError

_CHUNK = 1 << 20
_ROW = 1 << 10
_TOGETHER = 1 << 21
"""Words that a GPU sums at a time: 16 MiB, and as much again for their products."""


@torch.no_grad()
def checksums(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """A 64-bit checksum of each tensor's bytes, by name: its size in bytes plus Σ wᵢ·(2i+1) over
    its 8-byte words, mod 2⁶⁴, as a signed number.

    A changed word always changes it, since odd numbers have inverses; two that are exchanged do,
    since their factors differ, but for values that lie a large power of two apart. It tells
    accidents, not forgeries. A GPU sums many tensors at once, and is waited for once.
    """
    sums: dict[str, int] = {}
    elsewhere: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in pairs:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        sums[name] = flat.numel()
        words = _words(flat)
        if words.device.type == "cpu":
            sums[name] = _signed(sums[name] + _sum_on_cpu(words.numpy()))
        else:
            elsewhere.setdefault(words.device, {})[name] = words
    for group in elsewhere.values():
        for name, total in zip(group, sums_together(list(group.values())), strict=True):
            sums[name] = _signed(sums[name] + total)
    return sums


def receipt(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, list[Any]]:
    """Checksum, type and shape of each tensor, by name: what a sender and a receiver compare. The
    checksum is text, since not every reader of JSON keeps 64 bits."""
    tensors = dict(pairs)
    sums = checksums(tensors.items())
    return {
        name: [str(sums[name]), str(tensor.dtype).split(".")[-1], list(tensor.shape)]
        for name, tensor in tensors.items()
    }


def refuse_not_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises `PublishError` where a tensor holds a NaN or an infinity."""
    broken = not_finite(tensors.items())
    if broken:
        raise PublishError(
            f"{len(broken)} tensors hold NaN or infinity, first {broken[0]}: they are not "
            "published, and the servers keep their weights. Lower the learning rate, or go "
            "back to a checkpoint"
        )


@torch.no_grad()
def not_finite(pairs: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those that hold a NaN or an infinity."""
    floating = [(name, tensor) for name, tensor in pairs if tensor.is_floating_point()]
    if floating and all(tensor.is_cuda for _, tensor in floating) and norm_is_finite(floating):
        return []
    # A sum is one quick pass, and finite only where every element is; it may overflow by itself.
    sums = [tensor.sum().float() for _, tensor in floating]
    if len({total.device for total in sums}) == 1:
        sums = list(torch.stack(sums).cpu())  # one wait for the device, not one per tensor
    suspects = [pair for pair, total in zip(floating, sums, strict=True) if not total.isfinite()]
    return [name for name, tensor in suspects if not bool(torch.isfinite(tensor).all())]


@torch.no_grad()
def norm_is_finite(pairs: Sequence[tuple[str, Tensor]]) -> bool:
    """Whether the norm over all tensors is finite, in a few launches on a GPU. It is so only where
    every element is finite; squares may overflow by themselves."""
    norm = torch.nn.utils.get_total_norm([tensor for _, tensor in pairs])
    return bool(torch.isfinite(norm))


@torch.no_grad()
def sums_together(tensors: Sequence[Tensor]) -> list[int]:
    """Σ wᵢ·(2i+1) of each vector of words, mod 2⁶⁴, in a few launches for many vectors.

    They are laid into rows of equal length, zeros at the end. With r the row's number and j the
    place in it, 2i+1 = 2·length·r + 2j+1: two sums over each row are enough, and what is left to
    do per vector concerns only these.
    """
    device = tensors[0].device
    odd = 2 * torch.arange(_ROW, device=device) + 1
    zeros = torch.zeros(_ROW, dtype=torch.int64, device=device)
    plain: list[Tensor] = []
    weighted: list[Tensor] = []
    batch: list[Tensor] = []
    size = 0

    def lay_out() -> None:
        rows = (batch[0] if len(batch) == 1 else torch.cat(batch)).view(-1, _ROW)
        plain.append(rows.sum(1))
        weighted.append((rows * odd).sum(1))
        batch.clear()

    for words in tensors:
        for start in range(0, words.numel(), _TOGETHER):
            piece = words[start : start + _TOGETHER]
            padding = -piece.numel() % _ROW
            if batch and size + piece.numel() + padding > _TOGETHER:
                lay_out()
                size = 0
            batch += [piece, zeros[:padding]] if padding else [piece]
            size += piece.numel() + padding
    if batch:
        lay_out()
    counts = np.array([-(-words.numel() // _ROW) for words in tensors], dtype=np.int64)
    if not counts.sum():
        return [0] * len(tensors)
    owner = np.repeat(np.arange(len(tensors)), counts)
    row = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    places = torch.from_numpy(np.stack([owner, 2 * _ROW * row])).to(device)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    totals.index_add_(0, places[0], torch.cat(weighted) + places[1] * torch.cat(plain))
    return [int(total) for total in totals.tolist()]


def _sum_on_cpu(words: NDArray[np.int64]) -> int:
    """The weighted sum in one pass of one thread: torch's threads wait for each other at every
    step, which costs more than the sum where the machine is busy."""
    odd, total = _odd_numbers(), 0
    for start in range(0, words.size, _CHUNK):
        chunk = words[start : start + _CHUNK]
        total += int(np.dot(chunk, odd[: chunk.size])) + 2 * start * int(chunk.sum())
    return total


def _words(flat: Tensor) -> Tensor:
    """Bytes as 8-byte words, zeros to the end of the last."""
    whole = flat.numel() // 8 * 8
    head = flat[:whole]
    if head.storage_offset() % 8 or head.data_ptr() % 8:
        head = head.clone()
    words = head.view(torch.int64)
    if whole == flat.numel():
        return words
    tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    tail[: flat.numel() - whole] = flat[whole:]
    return torch.cat([words, tail.view(torch.int64)])


def _signed(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=1)
def _odd_numbers() -> NDArray[np.int64]:
    return 2 * np.arange(_CHUNK, dtype=np.int64) + 1
