"""Triton kernels for the decode step: each does in one launch what torch does in three to thirty.

A decode step has a few hundred tokens and is bound by launches, not by arithmetic. The kernels
compute in float32 and round once, where a module rounds after each operation. They read the
trainer's weights where they lie: nothing is packed or copied.
"""

from ludic.inference.local.gpu.kernels.adapters import add_low_rank as add_low_rank
from ludic.inference.local.gpu.kernels.attention import attend_rows as attend_rows
from ludic.inference.local.gpu.kernels.attention import rotary_tables as rotary_tables
from ludic.inference.local.gpu.kernels.attention import rotate_and_store as rotate_and_store
from ludic.inference.local.gpu.kernels.attention import row_parts as row_parts
from ludic.inference.local.gpu.kernels.early import can_be_early as can_be_early
from ludic.inference.local.gpu.kernels.products import MAX_PROJECT_ROWS as MAX_PROJECT_ROWS
from ludic.inference.local.gpu.kernels.products import gated as gated
from ludic.inference.local.gpu.kernels.products import project as project
from ludic.inference.local.gpu.kernels.products import rms_norm as rms_norm
from ludic.inference.local.gpu.kernels.products import silu_times as silu_times
from ludic.inference.local.gpu.kernels.products import split_pays as split_pays
from ludic.inference.local.gpu.kernels.products import split_product as split_product
from ludic.inference.local.gpu.kernels.sampling import draw_and_carry_on as draw_and_carry_on
