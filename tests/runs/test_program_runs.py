"""Run files whose agent is a program: checked, trained, and resumed in words when it is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.errors import ConfigError
from ludic.rollouts import read_rollouts
from ludic.runs.run import Run
from ludic.runs.settings import load_run
from ludic.runs.storage import rollout_file
from ludic.saw.building import build_items
from tests.interaction.program_things import solve

ROOT = Path(__file__).resolve().parents[2]
THINGS = ROOT / "tests" / "interaction" / "program_things.py"
EXAMPLE = ROOT / "examples" / "program_agent" / "run.toml"

RUN = """
schema = 1
[model]
name = "tiny"
[model.kwargs]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 1
max_position_embeddings = 256
[inference]
slots = 8
max_context_tokens = 256
[inference.sampling]
max_tokens = 4
[env]
kind = "dataset_qa"
kwargs = { rows = [{ question = "2 + 2 = ?", answer = "4" }] }
[protocol]
kind = "program"
[protocol.kwargs]
PROGRAM
reward = "tests.runs.test_program_runs:vowels"
[algorithm]
kwargs = { group_size = 4 }
[training]
steps = 3
rollouts_per_update = 8
max_steps = 1
max_seq_len = 256
[eval]
episodes = 2
[logging]
loggers = []
"""


def vowels(attempt: Any) -> float:
    """Something that random text has more or less of."""
    return float(sum(c in "aeiou" for c in attempt.answer)) + 0.01 * (len(attempt.answer) % 7)


def run_file(folder: Path, program: str) -> Path:
    path = folder / "run.toml"
    path.write_text(RUN.replace("PROGRAM", program), encoding="utf-8")
    return path


def trained(file: Path, folder: Path, *overrides: str) -> tuple[Run, list[Any]]:
    run = Run.from_file(file, list(overrides), out=folder).go()
    return run, list(read_rollouts(rollout_file(run.folder.rollouts, "train")))


@pytest.mark.integration
@pytest.mark.parametrize(
    "program",
    [
        'function = "tests.interaction.program_things:solve"',
        f"command = {json.dumps([sys.executable, str(THINGS), 'solve'])}",
    ],
    ids=["function", "command"],
)
def test_the_tiny_model_is_trained_through_a_program(program: str, tmp_path: Path) -> None:
    run, rollouts = trained(run_file(tmp_path, program), tmp_path / "run")
    metrics = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    updates = [m for m in metrics if "train/loss" in m]
    assert len(updates) == 3
    assert any(m["train/grad_norm"] > 0 for m in updates)
    # What the sampler said of its tokens is what the trainer finds: they are the same tokens.
    assert all(m["train/mismatch_max"] < 1e-4 for m in updates)
    assert len(rollouts) == 24
    assert all(rollout.error is None for rollout in rollouts)
    for rollout in rollouts:
        first, second = rollout.agent_steps
        assert second.fork is not None or second.trace.extends(first.trace)
        items = build_items([rollout], {(rollout.id, 0): 1.0})
        assert sum(int(item.action_mask.sum()) for item in items) == rollout.num_tokens
        assert len(items) == 1 + (second.fork is not None)


@pytest.mark.integration
def test_functions_of_a_script_are_trained_through_and_judge(tmp_path: Path) -> None:
    judged: list[str] = []

    def agent(task: str, base_url: str, api_key: str) -> str:
        return solve(task.upper(), base_url, api_key)

    def reward(attempt: Any) -> float:
        judged.append(attempt.question)
        return vowels(attempt)

    run = ludic.train(
        {"kind": "dataset_qa", "kwargs": {"rows": [{"question": "2 + 2?", "answer": "4"}]}},
        model={
            "name": "tiny",
            "kwargs": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1},
        },
        protocol={"kind": "program", "kwargs": {"function": agent, "reward": reward}},
        algorithm=ludic.grpo(group_size=4),
        inference={"max_context_tokens": 256, "sampling": {"max_tokens": 4}},
        training={"steps": 1, "rollouts_per_update": 4, "max_steps": 1, "max_seq_len": 256},
        eval={"episodes": 1},
        logging={"loggers": []},
        out=tmp_path / "run",
    )
    rollouts = list(read_rollouts(rollout_file(run.folder.rollouts, "train")))
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert rollouts[0].agent_steps[0].new_messages[0]["content"] == "2 + 2?"
    assert set(judged) == {"2 + 2?"}


def test_a_program_starts_where_its_run_file_lies(tmp_path: Path) -> None:
    file = run_file(tmp_path, 'command = ["python", "agent.py"]')
    assert load_run(file).protocol.kwargs["cwd"] == str(tmp_path)
    (tmp_path / "inner").mkdir()
    file = run_file(tmp_path, 'command = ["python", "agent.py"]\ncwd = "inner"')
    assert load_run(file).protocol.kwargs["cwd"] == str(tmp_path / "inner")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", "either a `command` or a `function`"),
        ('command = ["no-such-program"]', "there is no program 'no-such-program'"),
        ('function = "no_such_module:solve"', "no_such_module"),
        ('command = ["python"]\ntimeout = 3', "timeout"),
        ('command = ["python"]\ncwd = "nowhere"', "no such folder"),
    ],
)
def test_what_is_wrong_with_a_program_is_said_before_the_run_begins(
    program: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        Run.from_file(run_file(tmp_path, program), out=tmp_path / "run").go()
    assert not (tmp_path / "run").exists()


@pytest.mark.adapters("openai")
@pytest.mark.integration
@pytest.mark.timeout(400)
@pytest.mark.parametrize("as_command", [False, True], ids=["function", "command"])
def test_the_example_with_the_openai_package_is_trained(as_command: bool, tmp_path: Path) -> None:
    small = [
        "sft.examples=8", "sft.steps=30", "sft.batch_size=8", "training.steps=2",
        "training.rollouts_per_update=8", "algorithm.kwargs.group_size=4", "eval.episodes=2",
        "logging.loggers=[]",
    ]  # fmt: skip
    file = EXAMPLE
    if as_command:
        text = EXAMPLE.read_text(encoding="utf-8")
        assert 'function = "agent:solve"' in text
        file = tmp_path / "run.toml"
        file.write_text(
            text.replace('function = "agent:solve"', 'command = ["python", "agent.py"]')
        )
        for module in ("agent.py", "teacher.py", "judge.py"):
            (tmp_path / module).write_text((EXAMPLE.parent / module).read_text(encoding="utf-8"))
    run, rollouts = trained(file, tmp_path / "out", *small)
    assert len(rollouts) == 16
    assert all(rollout.error is None for rollout in rollouts)
    assert any(len(rollout.agent_steps) > 1 for rollout in rollouts)
    for rollout in rollouts:
        items = build_items([rollout], {(rollout.id, 0): 1.0})
        assert sum(int(item.action_mask.sum()) for item in items) == rollout.num_tokens
    assert run.report.stages["after_rl"].episodes
