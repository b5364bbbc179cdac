"""A run file as a plan sees it: its memory is the run's own, its lengths given, seen or assumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ludic.errors import ConfigError
from ludic.memory.plan import GIB
from ludic.plan.profile import shape_named
from ludic.plan.search import trainer_plan
from ludic.rollouts.storage import RolloutWriter
from ludic.runs.memory import plan_run
from ludic.runs.planning import Given, job_of
from ludic.runs.settings import parse_run
from ludic.types import AgentStep, Rollout, TokenTrace

RUN = """
[model]
name = "Qwen/Qwen2.5-1.5B-Instruct"
precision = "bfloat16"
[env]
kind = "tic_tac_toe"
[inference]
max_context_tokens = 1024
sampling = { max_tokens = 512 }
[training]
rollouts_per_update = 128
max_seq_len = 1024
steps = 7
"""

WORLDS = """
import ludic

class Quick(ludic.SingleAgentEnv):
    blocking = False

class Slow(ludic.SingleAgentEnv):
    blocking = True
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_the_memory_of_a_plan_is_what_the_run_computes(run: Path) -> None:
    job, _ = job_of(run, [], Given())
    shape = shape_named("Qwen2.5-1.5B")
    own = plan_run(parse_run(RUN), shape, torch.device("cuda"), int(139 * GIB))
    assert job.memory == own
    assert trainer_plan(job, 1, samples=True).parts == own.parts


def test_what_a_run_file_does_not_say_is_called_assumed(run: Path) -> None:
    job, origins = job_of(run, [], Given())
    assert (job.workload.episodes, job.workload.updates) == (128, 7)
    assert job.workload.lengths.mean == pytest.approx(0.6 * 512)
    assert "assumed" in origins["tokens of a completion"]
    said, origins = job_of(run, ["model.lora.rank=8"], Given(tokens=100, prompt=30, mode="async"))
    assert (said.workload.lengths.mean, said.workload.prompt, said.mode) == (100, 30, "async")
    assert said.costs.adapter is not None
    assert "given" in origins["tokens of a completion"]


def test_the_mode_is_the_run_files(run: Path) -> None:
    modes = [
        job_of(run, overrides, Given())[0].mode
        for overrides in ([], ["training.overlap=true"], ["pipeline={}"])
    ]
    assert modes == ["sync", "ahead", "async"]


def test_lengths_are_those_of_an_earlier_runs_rollouts(run: Path, tmp_path: Path) -> None:
    (tmp_path / "earlier" / "rollouts").mkdir(parents=True)
    with RolloutWriter(tmp_path / "earlier" / "rollouts" / "train.jsonl") as writer:
        for number in range(4):
            trace = TokenTrace((1,) * 10, (2,) * (5 + number), (-1.0,) * (5 + number))
            message = {"role": "assistant", "content": "x"}
            steps = [AgentStep(turn, (), message, "stop", trace) for turn in range(3)]  # type: ignore[arg-type]
            writer.write(Rollout(f"r{number}", tuple(steps)))
    job, origins = job_of(run, [], Given(earlier=tmp_path / "earlier"))
    assert sorted(set(job.workload.lengths.seen)) == [5, 6, 7, 8]
    assert (job.workload.turns, job.workload.prompt) == (3, 10)
    assert "earlier" in origins["turns of an episode"]
    with pytest.raises(ConfigError, match="no rollouts"):
        job_of(run, [], Given(earlier=tmp_path / "nowhere"))


def test_a_model_of_unknown_size_is_one_sentence(run: Path) -> None:
    with pytest.raises(ConfigError, match="--shape"):
        job_of(run, ["model.name=somebody/unknown-3B"], Given())
    job, _ = job_of(run, ["model.name=somebody/unknown-3B"], Given(shape="Qwen2.5-7B"))
    assert job.costs.shape == shape_named("Qwen2.5-7B")


def test_what_an_earlier_run_trained_on_counts_by_episode(run: Path, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "run.json").write_text('{"training": {"rollouts_per_update": 32}}')
    row = {"train/step": 1, "train/completion_tokens_mean": 100.0, "train/turns_mean": 1.0}
    row |= {"train/completion_tokens_max": 200.0, "train/item_tokens_mean": 150.0}
    row |= {"perf/tokens_computed": 32 * (100 + 50 / 8) / 2}  # half, a prompt counted once a group
    (earlier / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    job, _ = job_of(run, [], Given(earlier=earlier))  # 128 episodes an update
    assert job.workload.trained == pytest.approx(0.5, rel=0.01)


def test_whether_an_environment_blocks_is_asked_of_the_modules_beside_the_run_file(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "planned_worlds.py").write_text(WORLDS)
    quick, said = job_of(run, ["env.kind=planned_worlds:Quick"], Given(shape="Qwen2.5-0.5B"))
    slow, _ = job_of(run, ["env.kind=planned_worlds:Slow"], Given(shape="Qwen2.5-0.5B"))
    assert (quick.threaded, slow.threaded) == (False, True)
    assert "the environment" not in said
    unknown, said = job_of(run, ["env.kind=no_worlds_here:Any"], Given(shape="Qwen2.5-0.5B"))
    assert unknown.threaded
    assert "assumed" in said["the environment"]
