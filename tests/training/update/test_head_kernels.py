"""The GPU's kernels over logits against plain torch, run by Triton's interpreter on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.training.update import logprobs

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or `make setup`")

ROWS, VOCAB = 5, 37


@pytest.fixture(params=[16, 64], ids=["several blocks", "one block"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    import triton

    from ludic.training.update import kernels

    if not triton.knobs.runtime.interpret:
        pytest.skip("these tests are for Triton's interpreter; `tests/gpu` has those for a GPU")
    monkeypatch.setattr(kernels, "_LOGITS_BLOCK", request.param)
    return kernels


def inputs(masked: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    logits = 8 * torch.randn(ROWS, VOCAB, generator=gen)
    targets = torch.randint(VOCAB, (ROWS,), generator=gen)
    scales = 0.5 + torch.rand(ROWS, generator=gen)
    mask = None
    if masked:
        mask = torch.rand(ROWS, VOCAB, generator=gen) < 0.6
        mask[0, :32] = True  # whole blocks
        mask[torch.arange(ROWS), targets] = False
    return logits, scales, mask, targets


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_and_entropies_are_those_of_plain_torch(
    kernels: Any, masked: bool, entropy: bool
) -> None:
    logits, scales, mask, targets = inputs(masked)
    found = kernels.reduce(logits, scales, mask, targets, entropy)
    wanted = logprobs._reduce(logits.double(), scales.double(), mask, targets, entropy)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_plain_torch(
    kernels: Any, masked: bool, entropy: bool, dtype: torch.dtype
) -> None:
    logits, scales, mask, targets = inputs(masked)
    lse, _, entropies = logprobs._reduce(logits, scales, mask, targets, True)
    gen = torch.Generator().manual_seed(4)
    grads = [torch.randn(ROWS, generator=gen) for _ in range(2)]
    arguments = (logits, scales, mask, targets, lse, entropies, grads[0])
    more = grads[1] if entropy else None
    found = kernels.logit_gradient(*arguments, more, dtype)
    wanted = logprobs._logit_gradient(*arguments, more, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted)


def test_logits_that_are_not_finite_give_log_probs_that_are_not(kernels: Any) -> None:
    logits, scales, _, targets = inputs(False)
    logits[1, 3] = torch.nan
    _, found, _ = kernels.reduce(logits, scales, None, targets, True)
    assert found.isnan().tolist() == [False, True, False, False, False]


def test_a_chunk_without_rows_needs_no_kernel(kernels: Any) -> None:
    none = torch.zeros(0)
    lse, found, _ = kernels.reduce(none.view(0, VOCAB), none, None, none.long(), True)
    assert lse.shape == found.shape == (0,)
