"""Shapes in annotations are held to, in every test."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, jaxtyped
from torch import Tensor

from ludic.training.losses.policy_ratio import sequence_sum
from tests.shapes import check_shapes


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hook is off where there is a GPU")
def test_a_tensor_of_another_shape_than_annotated_is_an_error() -> None:
    ids = torch.tensor([0, 0, 1])
    assert sequence_sum(torch.ones(3), ids, 2).tolist() == [2.0, 1.0]
    with pytest.raises(TypeError):
        sequence_sum(torch.ones(3), ids[:2], 2)
    with pytest.raises(TypeError):
        sequence_sum(torch.ones(3, dtype=torch.int64), ids, 2)


def test_results_unions_and_tuples_are_looked_at_too() -> None:
    @jaxtyped(typechecker=check_shapes)
    def twice(
        a: Float[Tensor, " n"], b: Float[Tensor, " n"] | None = None, grow: int = 0
    ) -> tuple[Float[Tensor, " n"], int]:
        return torch.ones(len(a) + grow), 0

    assert len(twice(torch.ones(2))[0]) == 2
    with pytest.raises(TypeError, match=r"b is not as annotated|parameter 'b'"):
        twice(torch.ones(2), torch.ones(3))
    with pytest.raises(TypeError):
        twice(torch.ones(2), None, 1)
