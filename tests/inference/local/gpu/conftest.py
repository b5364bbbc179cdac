"""The kernels for tests without a GPU, and random numbers for them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The kernels, as Python where there is no GPU (`tests/conftest.py` asks Triton for that)."""
    import triton

    from ludic.inference.local.gpu import kernels

    if not triton.knobs.runtime.interpret:
        pytest.skip("these tests are for Triton's interpreter; `tests/gpu` has those for a GPU")
    return kernels


@pytest.fixture
def random_numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)
