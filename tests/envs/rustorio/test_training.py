"""A tiny model that knows three programs is trained on how they do."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from ludic.envs.rustorio import RustorioEnv
from ludic.runs.run import Run
from tests.envs.rustorio.conftest import MODE, STAGES, WINS, program

pytestmark = [
    pytest.mark.integration, pytest.mark.sandbox, pytest.mark.rust, pytest.mark.timeout(600)
]  # fmt: skip

PROGRAMS = [program(WINS), program("todo!()"), program("start")]
"""It wins, it panics, and it does not compile."""


def teacher(obs: str, rng: Random) -> str:
    return rng.choice(PROGRAMS)


def test_a_run_trains_on_programs_that_win_lose_and_do_not_compile(
    tmp_path: Path, crate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = RustorioEnv(crate=str(crate), mode=MODE, stages=STAGES)
    env.reset(seed=0)
    words = ["user\n", "assistant\n", "system\n", "Play.", env.env_current_obs(), *PROGRAMS]
    stages = "\n".join(f"{name} = {json.dumps(held)}" for name, held in STAGES.items())
    (tmp_path / "run.toml").write_text(
        f"""
[run]
name = "bakery"
seed = 0
threads = 1
[model]
name = "tiny"
kwargs = {{ max_position_embeddings = 1024, words = {json.dumps(words)} }}
[inference]
max_context_tokens = 1024
sampling = {{ max_tokens = 2 }}
[env]
kind = "rustorio"
[env.kwargs]
crate = {json.dumps(str(crate))}
mode = "{MODE}"
max_attempts = 1
[env.kwargs.stages]
{stages}
[protocol.kwargs]
system_prompt = "Play."
context = {{ kind = "compacting", window = 1024, summary_tokens = 16 }}
[sft]
teacher = "tests.envs.rustorio.test_training:teacher"
examples = 16
steps = 60
batch_size = 8
learning_rate = 3e-3
[algorithm]
name = "grpo"
kwargs = {{ group_size = 8 }}
[training]
steps = 2
rollouts_per_update = 8
max_steps = 1
max_seq_len = 1024
[eval]
episodes = 2
outcomes = ["won", "lost", "no_compile"]
[logging]
loggers = []
""",
        encoding="utf-8",
    )
    run = Run.from_file(tmp_path / "run.toml").go()
    lines = (run.folder.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    updates = [line for line in map(json.loads, lines) if "train/step" in line]
    assert [line["train/step"] for line in updates] == [1, 2]
    assert all(line["train/failed_episodes"] == 0 for line in updates)
    assert max(line["train/reward_max"] for line in updates) == 1.0
    assert min(line["train/reward_min"] for line in updates) <= 0.0
