"""Ranks that train together write a checkpoint together, and pass over a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.sharding.test_fsdp import run_ranks

pytestmark = pytest.mark.integration


def test_two_ranks_resume_from_the_same_whole_checkpoint(tmp_path: Path) -> None:
    run_ranks("two_ranks.py", tmp_path / "a.safetensors", 4, "float32", tmp_path / "ck")
    (tmp_path / "ck/step-00000004/state-00001.safetensors").unlink()
    run_ranks("two_ranks.py", tmp_path / "b.safetensors", 4, "float32", tmp_path / "ck")
    before, after = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert all(before[name].equal(after[name]) for name in before)
    assert sorted(p.name for p in (tmp_path / "ck").glob("*step*")) == [
        "damaged-step-00000004",
        "step-00000002",
        "step-00000004",
    ]


def test_two_ranks_write_in_the_background(tmp_path: Path) -> None:
    run_ranks("../training/checkpoints/two_writers.py", tmp_path / "ck")
    assert (tmp_path / "ck/latest").read_text() == "step-00000001"
