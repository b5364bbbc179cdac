"""What the plan foretells of an update is what a GPU allocates at most, within a tenth."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.memory import measure
from ludic.memory.plan import GIB

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_an_update_is_foretold(rank: int, checkpointing: bool) -> None:
    if torch.cuda.mem_get_info()[0] < 20 * GIB:
        pytest.skip("needs 20 GiB of free GPU memory")
    figures = measure("0.5b", rank, 4096, rows=64, length=256, checkpointing=checkpointing)
    gc.collect()
    torch.cuda.empty_cache()
    assert figures["predicted_over_peak"] == pytest.approx(1.0, abs=0.1)
