"""Which kernel attends within packed sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.training.update import attention


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU; nothing is computed with it here."""

    is_cuda = True


@pytest.mark.parametrize(
    ("dtype", "chosen"),
    [(torch.bfloat16, "varlen"), (torch.float16, "varlen"), (torch.float32, "sdpa")],
)
def test_on_a_gpu_the_packed_kernel_is_for_the_types_that_it_computes_in(
    dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def kernel(kind: str) -> Callable[..., torch.Tensor]:
        def call(*_: object) -> torch.Tensor:
            asked.append(kind)
            return torch.zeros(1)

        return call

    for kind in ("varlen", "sdpa"):
        monkeypatch.setitem(attention._KERNELS, kind, kernel(kind))
    query = torch.zeros(1, 2, 3, 4, dtype=dtype).as_subclass(OnGpu)
    attention.packed_attention(
        nn.Identity(),
        query,
        query,
        query,
        kind="auto",
        cu_seq_lens_q=torch.tensor([0, 3]),
        max_length_q=3,
    )
    assert asked == [chosen]


def test_a_kernel_that_does_not_compute_in_the_models_type_is_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"not in torch\.float32: load the model in one of them"):
        attention.packed_attention(
            nn.Identity(),
            query,
            query,
            query,
            kind="varlen",
            cu_seq_lens_q=torch.tensor([0, 3]),
            max_length_q=3,
        )
