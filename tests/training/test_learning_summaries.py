"""It learns what only a summary can carry, if the summary gets credit, and not otherwise."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compaction"
CHANCE = 0.25
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def train() -> Callable[..., dict[str, Any]]:
    found: Callable[..., dict[str, Any]] = runpy.run_path(str(EXAMPLE / "train.py"))["train"]
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("credit", ["advantage", "none"])
def test_a_number_outlives_three_compactions_only_with_credit_for_the_summary(
    train: Callable[..., dict[str, Any]], tmp_path: Path, seed: int, credit: str
) -> None:
    result = train(seed, credit, tmp_path / "run", [])
    assert result["fewest_compactions"] >= 3
    assert result["right"]["after_sft"] <= CHANCE + 0.1
    if credit == "advantage":
        assert result["right"]["after_rl"] >= 0.8
    else:
        assert result["right"]["after_rl"] <= CHANCE + 0.1
