"""Ranks that train together write a checkpoint together, and pass over a damaged one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ludic.errors import CheckpointError
from ludic.training.checkpoint_contents import model_fingerprint
from tests.forked import run_ranks
from tests.sharding.test_fsdp import TWO_RANKS
from tests.training.checkpoints.lora_ranks import adapted, train

HERE = Path(__file__).parent
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_two_ranks_resume_from_the_same_whole_checkpoint(tmp_path: Path) -> None:
    job = {"steps": 4, "dtype": "float32", "checkpoints": str(tmp_path / "ck")}
    first = {"out": str(tmp_path / "a.safetensors"), **job}
    lost = str(tmp_path / "ck/step-00000004/state-00001.safetensors")
    again = {"out": str(tmp_path / "b.safetensors"), "lost": lost, **job}
    run_ranks(TWO_RANKS, json.dumps([first, again]))
    before, after = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert all(before[name].equal(after[name]) for name in before)
    assert sorted(p.name for p in (tmp_path / "ck").glob("*step*")) == [
        "damaged-step-00000004",
        "step-00000002",
        "step-00000004",
    ]


def test_two_ranks_write_in_the_background(tmp_path: Path) -> None:
    run_ranks(HERE / "two_writers.py", tmp_path / "ck")
    assert (tmp_path / "ck/latest").read_text() == "step-00000001"


def test_an_adapters_checkpoint_goes_from_one_rank_to_three_and_back(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    train(tmp_path / "one", 2, folder)
    ranks = 3  # of the adapter's four rows, the last has none
    run_ranks(HERE / "lora_ranks.py", tmp_path / "three.safetensors", 4, folder, ranks=ranks)
    back = train(tmp_path / "back", 6, folder)
    straight = train(tmp_path / "straight", 6, tmp_path / "other")
    four = train(tmp_path / "four", 4, tmp_path / "another")
    three = load_file(tmp_path / "three.safetensors")
    for name in straight:
        torch.testing.assert_close(three[name], four[name], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(back[name], straight[name], rtol=1e-6, atol=1e-9)
    prints = [
        json.loads((ck / f"step-{step:08d}/manifest.json").read_text())["fingerprint"]
        for ck, step in ((folder, 4), (folder, 6), (tmp_path / "other", 6))
    ]
    assert len(set(prints)) == 1
    with pytest.raises(CheckpointError, match="another model"):  # other frozen weights
        train(tmp_path / "else", 8, folder, seed=1)


def test_an_adapters_checkpoint_from_before_frozen_values_counted_on_ranks_is_resumed(
    tmp_path: Path,
) -> None:
    train(tmp_path / "one", 2, tmp_path / "ck")
    file = tmp_path / "ck/step-00000002/manifest.json"
    older = json.loads(file.read_text())
    older["fingerprint"] = model_fingerprint(adapted(), frozen_values=False)
    file.write_text(json.dumps(older))
    resumed = train(tmp_path / "on", 4, tmp_path / "ck")
    straight = train(tmp_path / "straight", 4, tmp_path / "other")
    assert all(resumed[name].equal(straight[name]) for name in straight)
