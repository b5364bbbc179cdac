"""The kernels between a layer's products against plain torch, run by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.update import plain_kernels as plain

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or `make setup`")

ROWS = 7


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    import triton

    from ludic.training.update import kernels

    if not triton.knobs.runtime.interpret:
        pytest.skip("these tests are for Triton's interpreter; `tests/gpu` has those for a GPU")
    monkeypatch.setattr(kernels, "_BLOCK", 16)
    monkeypatch.setattr(kernels, "_NORM_PROGRAMS", 3)
    return kernels


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("width", [16, 24])
def test_norms_and_their_gradients(kernels: Any, adds: bool, width: int) -> None:
    x, weight, grad = drawn(ROWS, width), drawn(width, seed=1), drawn(ROWS, width, seed=2)
    y, through = (drawn(ROWS, width, seed=3), drawn(ROWS, width, seed=4)) if adds else (None, None)
    results = kernels.norm(x, y, weight, 1e-5)
    wanted = plain.norm(x, y, weight, 1e-5)
    torch.testing.assert_close(results, wanted)
    _, scales, total = wanted
    torch.testing.assert_close(
        kernels.norm_gradient(grad, through, total, weight, scales),
        plain.norm_gradient(grad, through, total, weight, scales),
    )


def test_the_gate_and_its_gradients(kernels: Any) -> None:
    gate, up, grad = (drawn(ROWS, 13, seed=i) for i in range(3))
    torch.testing.assert_close(kernels.gated(gate, up), plain.gated(gate, up))
    wanted = plain.gated_gradient(gate, up, grad)
    torch.testing.assert_close(kernels.gated_gradient(gate, up, grad), wanted)


@pytest.mark.parametrize("back", [False, True])
def test_rotations_and_back(kernels: Any, back: bool) -> None:
    x = drawn(ROWS, 5, 8)[:, 1:4]  # not dense: a part of a larger product
    cos, sin = drawn(ROWS, 8, seed=1), drawn(ROWS, 8, seed=2)
    torch.testing.assert_close(
        kernels.rotated(x, cos, sin, back=back), plain.rotated(x, cos, sin, back=back)
    )
