"""The tiny settings of the examples of distillation, replay, a new algorithm and a loop by hand."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ludic
from ludic.errors import ConfigError
from ludic.runs.run import Run
from ludic.training import KLInReward, MaskedImportance, make_algorithm
from ludic.training.preprocess import steps_of, turn_weights
from tests.training.synthetic import synthetic_batch

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICK = ["eval.episodes=8", "logging.loggers=[]"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("distillation", "new_algorithm", "replay_buffer"):
        monkeypatch.syspath_prepend(str(EXAMPLES / name))


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(path: str, *overrides: str, out: str) -> Run:
    return Run.from_file(EXAMPLES / path, [*QUICK, *overrides], out=out).go()


def metrics(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]


def test_a_student_comes_nearer_to_its_teacher() -> None:
    trained("distillation/tiny_teacher.toml", out="runs/distillation/tiny-teacher")
    steps = ["sft.steps=60", "training.steps=8", "training.rollouts_per_update=64"]
    lines = metrics(trained("distillation/tiny_opd.toml", *steps, out="student"))
    gaps = [line["train/kl_teacher"] for line in lines]
    assert len(gaps) == 8
    assert sum(gaps[-3:]) < 0.9 * sum(gaps[:3])


def test_mopd_learns_two_domains_from_a_teacher_each() -> None:
    few = ["--steps", "1", "--student-steps", "2", "--start-steps", "20", "--episodes", "8"]
    settings = ["training.rollouts_per_update=64", "logging.loggers=[]"]
    student: Run = script("distillation/train_mopd.py").main([*few, *settings])
    assert student.config.training.rollouts_per_update == 64
    assert [teacher.envs for teacher in student.config.teacher] == [["sums"], ["larger"]]
    loss: Any = student.algorithm.loss
    assert loss.corrections == (MaskedImportance(0.5, 2.0),)
    assert student.algorithm.group_size == 8
    lines = metrics(student)
    assert all("train/correction_token_masked_fraction" in line for line in lines)
    assert [line["train/step"] for line in lines] == [1, 2]
    assert {path.name for path in Path("runs/mopd").iterdir()} >= {"start", "sums", "larger"}


def test_a_student_is_cut_out_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    from ludic.inference.tiny import tiny_model, tiny_tokenizer

    whole = tiny_model(layers=5)
    whole.save_pretrained(tmp_path / "whole")
    tiny_tokenizer().save_pretrained(tmp_path / "whole")
    arguments = ["cut", "--model", "whole", "--layers", "3", "--output", "part"]
    monkeypatch.setattr("sys.argv", arguments)
    script("distillation/cut_student.py").main()
    part = AutoModelForCausalLM.from_pretrained(tmp_path / "part")
    kept = [layer.mlp.up_proj.weight.tolist() for layer in part.model.layers]
    assert kept == [whole.model.layers[i].mlp.up_proj.weight.tolist() for i in (0, 2, 4)]


def test_reinforce_pp_is_used_by_name_and_stays_near_its_start() -> None:
    steps = ["sft.steps=40", "training.steps=3", "training.rollouts_per_update=16"]
    run = trained("new_algorithm/tiny.toml", *steps, out="run")
    assert run.algorithm.name == "reinforce_pp"
    charge, _ = steps_of(run.algorithm.preprocess)
    assert charge == KLInReward(0.01, "rollout")
    assert len(metrics(run)) == 3
    with pytest.raises(ConfigError, match=r"reinforce_pp.*needs a reference"):
        Run.of_config(
            run.config.model_copy(update={"reference": None}),
            run.folder,
            EXAMPLES / "new_algorithm",
        )


def test_reinforce_pp_normalises_over_the_tokens_of_the_batch() -> None:
    importlib.import_module("reinforce_pp")  # which registers it, once
    batch = synthetic_batch(3)
    after = make_algorithm("reinforce_pp").prepare(batch)
    before = np.concatenate([i.attachments.token_weights for i in batch.items])
    found = np.concatenate([i.attachments.token_weights for i in after.items])
    expected = (before - before.mean()) / before.std()
    assert found == pytest.approx(expected, abs=1e-4)
    weights = turn_weights(after)
    for key, weight in turn_weights(batch).items():
        assert weights[key] == pytest.approx((weight - before.mean()) / before.std(), abs=1e-4)


def test_half_of_each_batch_is_from_the_buffer() -> None:
    steps = ["sft.steps=30", "training.steps=4", "training.rollouts_per_update=16"]
    lines = metrics(trained("replay_buffer/tiny.toml", *steps, out="run"))
    assert [line["train/replay_share"] for line in lines] == [0.0, 0.5, 0.5, 0.5]
    assert [line["train/reward_mean"] for line in lines]
    assert lines[-1]["train/rollouts"] == 32
    assert 1 <= lines[-1]["train/replay_age_mean"] <= lines[-1]["train/replay_age_max"] <= 3


def test_a_run_with_a_replay_buffer_is_resumed_to_the_bit() -> None:
    steps = ["sft.steps=10", "training.rollouts_per_update=16", "training.checkpoint_every=1"]
    whole = trained("replay_buffer/tiny.toml", *steps, "training.steps=4", out="whole")
    trained("replay_buffer/tiny.toml", *steps, "training.steps=2", out="part")
    again = ludic.resume("part", steps=4)
    weights = [(r.folder.weights() / "model.safetensors").read_bytes() for r in (whole, again)]
    assert weights[0] == weights[1]
    for one, other in zip(metrics(whole), metrics(again), strict=True):
        same = {k for k in one if not k.startswith("perf/")}
        assert {k: one[k] for k in same} == {k: other[k] for k in same}


def test_the_loop_by_hand_learns_and_is_short() -> None:
    module = script("custom_loop/train.py")
    rewards = asyncio.run(module.train(steps=12))
    assert len(rewards) == 12
    assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3])
    assert len((EXAMPLES / "custom_loop/train.py").read_text().splitlines()) < 80
