"""GSM8K: the options of the training, and an evaluation of every row."""

from __future__ import annotations

import json
import runpy
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.runs.settings import load_run

pytestmark = pytest.mark.timeout(300)

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gsm8k"


def test_the_options_of_the_training_are_settings_of_its_run_file(tmp_path: Path) -> None:
    overrides = runpy.run_path(str(FOLDER / "train_gsm8k.py"))["overrides"]
    options = Namespace(
        model="some/model", data=tmp_path, host="10.0.0.1", port=8001, settings=["run.seed=7"]
    )
    config = load_run(FOLDER / "train.toml", overrides(options))
    assert config.model.name == "some/model"
    assert config.env[0].kwargs["path"] == str(tmp_path / "train.jsonl")
    assert config.eval.env[0].kwargs["path"] == str(tmp_path / "test.jsonl")
    assert config.inference.backend == "vllm"
    assert config.inference.servers == ["http://10.0.0.1:8001"]
    assert config.run.seed == 7
    plain = Namespace(model=None, data=None, host="127.0.0.1", port=None, settings=[])
    assert overrides(plain) == []


def test_every_row_is_evaluated_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(hidden_size=32, heads=2, kv_heads=1, layers=1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    report, rows = tmp_path / "report.json", FOLDER / "tiny.jsonl"
    options = ["--model", tmp_path, "--data", rows, "--output", report, "--samples", 2]
    options += ["--temperature", 1.0, "--max-tokens", 4, "--max-context-tokens", 512]
    script = FOLDER / "eval_gsm8k_vllm.py"
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, options)])
    runpy.run_path(str(script), run_name="__main__")
    assert "pass@2" in capsys.readouterr().out
    episodes = json.loads(report.read_text(encoding="utf-8"))["episodes"]
    tasks = [episode["task_key"] for episode in episodes]
    assert sorted(tasks) == sorted(f"tiny#{row}" for row in range(8) for _ in range(2))
