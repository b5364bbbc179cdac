"""Triton kernels for the decode step: each does in one launch what torch does in three to thirty.

A decode step has a few hundred tokens and is bound by launches, not by arithmetic. The kernels
compute in float32 and round once, where a module rounds after each operation. They read the
trainer's weights where they lie: nothing is packed or copied.
"""

from ludic.inference.local.gpu.kernels.adapters import add_low_rank
from ludic.inference.local.gpu.kernels.attention import (
    attend_rows,
    rotary_tables,
    rotate_and_store,
)
from ludic.inference.local.gpu.kernels.early import can_be_early
from ludic.inference.local.gpu.kernels.products import (
    MAX_ADAPTED_ELEMENTS,
    MAX_PROJECT_ROWS,
    MAX_SPLIT_ELEMENTS,
    gated,
    project,
    rms_norm,
    silu_times,
    split_product,
)
from ludic.inference.local.gpu.kernels.sampling import draw_and_carry_on

__all__ = [
    "MAX_ADAPTED_ELEMENTS",
    "MAX_PROJECT_ROWS",
    "MAX_SPLIT_ELEMENTS",
    "add_low_rank",
    "attend_rows",
    "can_be_early",
    "draw_and_carry_on",
    "gated",
    "project",
    "rms_norm",
    "rotary_tables",
    "rotate_and_store",
    "silu_times",
    "split_product",
]
