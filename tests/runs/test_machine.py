"""What the machine has is said, and how to get what it lacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ludic.runs.machine import MachineFact, check_machine


def test_the_machine_is_described_with_remedies_for_what_is_missing() -> None:
    facts = {fact.name: fact for fact in check_machine()}
    assert torch.__version__.startswith(facts["torch"].found.split("+")[0])
    assert "cores" in facts["machine"].found
    for fact in facts.values():
        assert (fact.found == "missing") == (fact.remedy is not None)


def test_a_gpu_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ludic.runs.machine._gpu", lambda: MachineFact("GPU", "one"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    (fact,) = [fact for fact in check_machine() if fact.name == "C compiler"]
    assert fact.found == "missing"
    assert fact.remedy is not None
    assert "install gcc" in fact.remedy
    assert f"CC={tmp_path}/none" in fact.remedy
    monkeypatch.setenv("CC", sys.executable)
    (fact,) = [fact for fact in check_machine() if fact.name == "C compiler"]
    assert (fact.found, fact.remedy) == (sys.executable, None)
