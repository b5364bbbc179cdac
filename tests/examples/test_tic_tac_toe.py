"""The scripts run one after the other, each on what the one before it left."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ludic.inference.tiny import tiny_model, tiny_tokenizer
from tests.examples.conftest import run_script

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.examples
@pytest.mark.usefixtures("process_as_it_was")
def test_data_cold_start_grpo_and_evaluation_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ludic.inference.vllm.server.DEFAULT_PORT", 9)  # where nobody listens

    def run(script: str, *arguments: str) -> str:
        run_script(script, *arguments, monkeypatch=monkeypatch)
        return capsys.readouterr().out

    made = run("tic_tac_toe/generate_synth_data.py", "--games", "8")
    rows = (tmp_path / "runs/tic_tac_toe/moves.jsonl").read_text().splitlines()
    assert f"wrote {len(rows)} moves of 8 games" in made
    last = json.loads(rows[0])["messages"][-1]
    assert last["role"] == "assistant"
    assert last["content"].startswith("<move>")

    # Enough for a form of answer, not for a game.
    told = run("tic_tac_toe/sft_tic_tac_toe.py", "--steps", "25", "--batch-size", "16")
    assert "saved to runs/tic_tac_toe/sft" in told
    assert (tmp_path / "runs/tic_tac_toe/sft/tokenizer.json").is_file()

    small = ["--steps", "2", "--rollouts-per-update", "8", "--group-size", "4", "--rank", "2"]
    told = run("tic_tac_toe/train_tic_tac_toe.py", *small)
    assert "step      2" in told
    before, after = (
        (tmp_path / f"runs/tic_tac_toe/{name}/model.safetensors").read_bytes()
        for name in ("sft", "grpo")
    )
    assert before != after

    arguments = ["--model", "runs/tic_tac_toe/grpo", "--games", "6", "--output", "report.json"]
    told = run("tic_tac_toe/eval_tic_tac_toe_vllm.py", *arguments)
    assert "parse_failure" in told
    assert len(json.loads((tmp_path / "report.json").read_text())["episodes"]) == 6

    told = run("rejection_sampling.py", "--games", "6", "--above", "-10")
    assert "kept 6 of 6 games" in told
    kept = ["--model", "runs/tic_tac_toe/sft", "--data", "runs/tic_tac_toe/won.jsonl.zst"]
    run("tic_tac_toe/sft_tic_tac_toe.py", *kept, "--steps", "1", "--output", "again")
    assert (tmp_path / "again" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("script", "options", "made"),
    [
        ("rejection_sampling.py", ["--games", "2", "--above", "-10"], "won.jsonl.zst"),
        (
            "tic_tac_toe/train_tic_tac_toe.py",
            ["--steps", "1", "--rollouts-per-update", "4", "--group-size", "2", "--rank", "2"],
            "grpo/model.safetensors",
        ),
    ],
)
def test_a_script_without_arguments_makes_the_model_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, options: list[str], made: str
) -> None:
    asked = []

    def make(command: list[Any], **_: Any) -> None:
        asked.append([Path(part).name for part in command[1:]])
        folder = Path(command[-1])
        tiny_model(hidden_size=16, heads=2, kv_heads=1, layers=1).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", make)
    monkeypatch.setattr("ludic.inference.vllm.server.DEFAULT_PORT", 9)  # where nobody listens
    path = str(ROOT / "examples" / script)
    monkeypatch.setattr(sys, "argv", [path, *options])
    runpy.run_path(path, run_name="__main__")
    assert asked == [["sft_tic_tac_toe.py", "--output", "sft"]]
    assert (tmp_path / "runs/tic_tac_toe" / made).is_file()
