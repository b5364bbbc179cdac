"""Kernels that are launched before the previous one has ended.

In a decode step, a kernel's launch, first reads and last writes take as long as its work. On Hopper
and newer, the next kernel may already be on the device: it waits inside, before it touches
anything that an earlier kernel reads or writes. Each such kernel waits for the whole previous
kernel, which waited for the one before it: so after the wait, all earlier kernels have ended. A
kernel that releases the next one only after its own wait guarantees more: the next one may read,
even before its wait, whatever was written before both (`adapters`).

Weights may be read before the wait. They change only between two steps, and the engine continues
only after the change has ended on the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    """Returns when the kernels in front have ended and what they wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The next kernel may be launched once every program of this one has said so. It takes room
    from those programs, so where to say it is a matter of measurement."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def call_up(at, size, EARLY: tl.constexpr):
    """Asks for `size` bytes, a multiple of 16, from `at` on to be brought into the L2 cache.

    May stand before the wait, whoever writes there: all writes pass through that cache.
    """
    if EARLY:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x;"
            " setp.eq.u32 first, thread, 0;"
            " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [at.to(tl.int64), size.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def launch_options(device: torch.device) -> dict[str, Any]:
    """What a kernel that waits is launched with."""
    return {"EARLY": True, "launch_pdl": True} if can_be_early(device) else {"EARLY": False}


@cache
def can_be_early(device: torch.device) -> bool:
    """Whether the device and this Triton have early launches."""
    if device.type != "cuda" or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
