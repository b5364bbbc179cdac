"""A run whose episodes are played in other processes learns the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ludic
from ludic.errors import ConfigError
from ludic.rollouts import read_rollouts
from ludic.runs.storage import rollout_file
from tests.runs.test_run import small
from tests.runs.worlds import Letters

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def training(workers: int) -> dict[str, Any]:
    return {**small()["training"], "rollouts_per_update": 8, "workers": workers}


def test_updates_and_rollouts_are_those_of_one_process(tmp_path: Path) -> None:
    weights, metrics, rollouts = [], [], []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        run = ludic.train(**small(env=Letters, training=training(workers), out=folder))
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        timeless = [{k: v for k, v in x.items() if "perf/" not in k and k != "time"} for x in lines]
        metrics.append(timeless)
        found = read_rollouts(rollout_file(folder / "rollouts", "train"))
        rollouts.append({r.id: [s.trace for s in r.agent_steps] for r in found})
    assert torch.equal(*weights)
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == 2
    assert rollouts[0] == rollouts[1]
    assert len(rollouts[0]) == 16


def test_what_other_processes_cannot_have_is_refused_before_anything_starts(tmp_path: Path) -> None:
    class Local(Letters):
        """Of this function alone."""

    arguments = small(env=Local, training=training(1), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"training\.workers=1.*object of this script"):
        ludic.train(**arguments)
    assert not (tmp_path / "run").exists()
