"""A device that has no memory left: how to tell, and what can be given back."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether torch raised this for want of memory, on a GPU or on the host."""
    if isinstance(exc, torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and "can't allocate memory" in str(exc)


def release_memory() -> None:
    """Gives back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
