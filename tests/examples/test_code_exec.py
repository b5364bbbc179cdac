"""The tiny setting trains a few updates from its run file; HumanEval is evaluated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.envs.code_exec import Judge, Limits, Outcome, SandboxPool, make_verifier
from ludic.envs.code_exec.tasks import stdio_task
from ludic.inference.tiny import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.sandbox, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "code_exec"


def run(where: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tiny_setting_trains_a_few_updates(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "code_exec")
    small = [
        "training.steps=2", "training.rollouts_per_update=16", "sft.examples=40", "sft.steps=30",
        "eval.episodes=8", "env.kwargs.tasks=6",
    ]  # fmt: skip
    run(tmp_path, "-m", "ludic", "train", "code_exec/tiny.toml", *small)
    (summary,) = tmp_path.glob("**/summary.json")
    found = json.loads(summary.read_text())
    assert found["headline"] == "passed"
    metrics = (summary.parent / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/step"] for line in metrics] == [1, 2]
    # After the cold start, programs run: some pass, or at least fail by their output.
    after = json.loads((summary.parent / "eval" / "after_sft.json").read_text())
    assert {episode["outcome"] for episode in after["episodes"]} <= {
        *map(str, Outcome), None
    }  # fmt: skip
    assert any(episode["outcome"] in ("passed", "failed") for episode in after["episodes"])


def test_the_generated_tasks_have_the_answers_that_they_say(tmp_path: Path) -> None:
    lines = run(tmp_path, str(EXAMPLES / "small_tasks.py"), "--tasks", "12").splitlines()
    rows = [json.loads(line) for line in lines]
    solutions = {
        "difference of a and b": "a, b = map(int, input().split())\nprint(a - b)",
        "largest number": "print(max(map(int, input().split())))",
        "words sorted": "print(*sorted(input().split()))",
    }
    tried = 0
    with SandboxPool(workers=1) as pool:
        judge = Judge(pool, make_verifier("whitespace"), Limits(), "bubblewrap")
        for row in rows:
            for words, solution in solutions.items():
                if words in row["prompt"] and "smallest" not in row["prompt"]:
                    assert judge(stdio_task(row), solution).outcome is Outcome.PASSED
                    tried += 1
    assert tried >= 2


def test_humaneval_is_evaluated_task_by_task(tmp_path: Path) -> None:
    row = {
        "task_id": "T/0",
        "prompt": "def two():\n    '''Returns 2.'''\n",
        "entry_point": "two",
        "test": "def check(candidate):\n    assert candidate() == 2\n",
    }
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    folder = tmp_path / "model"
    tiny_model(hidden_size=32, heads=2, kv_heads=1, layers=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    said = run(
        tmp_path, str(EXAMPLES / "eval_humaneval.py"), "--model", "model", "--data", "tasks.jsonl",
        "--samples", "2", "--max-tokens", "8", "--max-context-tokens", "512",
        "--output", "report.json",
    )  # fmt: skip
    assert "pass@2" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["episodes"]) == 6
