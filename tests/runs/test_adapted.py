"""Run files whose environments and tools come from other packages: the tiny model is trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ludic.rollouts import read_rollouts
from ludic.runs.run import Run
from ludic.runs.storage import rollout_file

pytestmark = [pytest.mark.adapters, pytest.mark.integration, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "adapters"
SMALL = [
    "sft.examples=32", "sft.steps=30", "sft.batch_size=16", "training.steps=3", "eval.episodes=2",
    "training.rollouts_per_update=8", "algorithm.kwargs.group_size=4", "logging.loggers=[]",
]  # fmt: skip


def trained(file: Path, folder: Path, *overrides: str) -> tuple[Run, list[dict[str, Any]]]:
    """The finished run, and the metrics of its updates."""
    run = Run.from_file(file, [*SMALL, *overrides], out=folder).go()
    lines = run.folder.metrics.read_text(encoding="utf-8").splitlines()
    return run, [json.loads(line) for line in lines]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", ["frozen_lake", "guess_the_number", "chain_sum"])
def test_the_tiny_model_is_trained_from_a_run_file(name: str, tmp_path: Path) -> None:
    run, metrics = trained(FILES / f"{name}.toml", tmp_path / "run")
    assert len([m for m in metrics if "train/loss" in m]) == 3
    assert any(m.get("train/grad_norm", 0.0) > 0 for m in metrics)
    assert run.report.stages["after_rl"].episodes
    rollouts = list(read_rollouts(rollout_file(run.folder.rollouts, "train")))
    assert len(rollouts) == 3 * 8
    assert all(rollout.error is None for rollout in rollouts)
    assert all(step.trace is not None for r in rollouts for step in r.agent_steps)


SERVED = f"""
schema = 1
[model]
name = "tiny"
[model.kwargs]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 1
max_position_embeddings = 1024
[inference]
slots = 8
max_context_tokens = 700
[inference.sampling]
max_tokens = 4
[env]
kind = "reasoning_gym"
kwargs = {{ task = "chain_sum", level = 0, system_prompt = "" }}
[protocol.kwargs]
agent = "react"
[[protocol.kwargs.mcp]]
name = "things"
command = {json.dumps([sys.executable, str(ROOT / "tests" / "agents" / "mcp_things.py")])}
connection = "shared"
tools = ["add"]
env = {{ THINGS_MARKS = "MARKS" }}
[sft]
teacher = "teachers:nearly"
[algorithm]
kwargs = {{ group_size = 4 }}
[training]
max_steps = 1
max_seq_len = 700
"""


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_the_servers_of_a_run_are_started_once_and_end_with_it(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "teachers.py").write_text((FILES / "teachers.py").read_text())
    (tmp_path / "run.toml").write_text(SERVED.replace('MARKS"', f'{marks}"'))
    run, metrics = trained(tmp_path / "run.toml", tmp_path / "run")
    assert len([m for m in metrics if "train/loss" in m]) == 3
    rollouts = list(read_rollouts(rollout_file(run.folder.rollouts, "train")))
    assert all(rollout.error is None for rollout in rollouts)
    pids = [int(mark.name) for mark in marks.iterdir()]
    # One for the run itself, and one for the teacher's episodes before it.
    assert 1 <= len(pids) <= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
