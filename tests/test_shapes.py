"""Shapes in annotations are held to, in every test, and in a program that asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, jaxtyped
from torch import Tensor

from ludic.errors import ConfigError
from ludic.plumbing import shapes
from ludic.training.losses.policy_ratio import sequence_sum

WRONG = (
    "import torch; from ludic.training.losses.policy_ratio import sequence_sum; "
    "sequence_sum(torch.ones(3), torch.zeros(3, dtype=torch.int32).float(), 2)"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hook is off where there is a GPU")
def test_a_tensor_of_another_shape_than_annotated_is_an_error() -> None:
    ids = torch.tensor([0, 0, 1])
    assert sequence_sum(torch.ones(3), ids, 2).tolist() == [2.0, 1.0]
    with pytest.raises(TypeError):
        sequence_sum(torch.ones(3), ids[:2], 2)
    with pytest.raises(TypeError):
        sequence_sum(torch.ones(3, dtype=torch.int64), ids, 2)


def test_results_unions_and_tuples_are_looked_at_too() -> None:
    @jaxtyped(typechecker=shapes.checked)
    def twice(
        a: Float[Tensor, " n"], b: Float[Tensor, " n"] | None = None, grow: int = 0
    ) -> tuple[Float[Tensor, " n"], int]:
        return torch.ones(len(a) + grow), 0

    assert len(twice(torch.ones(2))[0]) == 2
    with pytest.raises(TypeError, match="b"):
        twice(torch.ones(2), torch.ones(3))
    with pytest.raises(TypeError):
        twice(torch.ones(2), None, 1)


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_a_program_asks_for_it_by_a_setting(repo_root: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", WRONG],
        env={**os.environ, shapes.SETTING: "1", "PYTHONPATH": str(repo_root / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 1
    assert "sequence_sum" in told.stderr
    assert "TypeCheckError" in told.stderr


def test_without_beartype_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install beartype"):
        shapes.check_shapes()
