"""`ludic train` and `ludic sft`: from a run file to a folder that says how it went."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from ludic.rollouts import read_rollouts
from ludic.rollouts.storage import rollout_row
from ludic.types import to_json
from tests.cli.conftest import Ludic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def test_a_run_leaves_a_folder_that_says_what_was_run_and_how_it_went(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["headline"] == "right"
    for stage in ("before", "after_sft", "after_rl"):
        rate = summary[f"right_{stage}"]
        assert 0 <= rate["low"] <= rate["value"] <= rate["high"] <= 1
        report = json.loads((trained / "eval" / f"{stage}.json").read_text())
        assert len(report["episodes"]) == summary["episodes"][stage] == 8
        right = sum(episode["outcome"] == "right" for episode in report["episodes"])
        assert rate["value"] == right / 8
    assert summary["seed"] == 0
    assert json.loads((trained / "run.json").read_text())["training"]["steps"] == 4
    origin = json.loads((trained / "origin.json").read_text())
    assert {"python", "torch", "transformers"} <= origin["versions"].keys()
    assert origin["command"][1:3] == ["train", "letters.toml"]
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/step"] for line in lines] == [1, 2, 3, 4]
    assert (trained / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(read_rollouts(trained / "rollouts" / "train.jsonl.zst"))) == 4 * 8
    assert (trained / "checkpoints" / "rl" / "latest").read_text() == "step-00000004"


def test_training_changes_the_weights_in_both_stages(trained: Path) -> None:
    def weights(stage: str, step: int) -> bytes:
        model = trained / "checkpoints" / stage / f"step-{step:08d}" / "model"
        return (model / "model.safetensors").read_bytes()

    assert len({weights("sft", 11), weights("sft", 12), weights("rl", 3), weights("rl", 4)}) == 4


def test_the_built_in_run_reports_wins_even_where_there_are_none(
    ludic: Ludic, tmp_path: Path
) -> None:
    small = [
        "model.kwargs.hidden_size=16",
        "model.kwargs.layers=1",
        "model.kwargs.heads=2",
        "model.kwargs.kv_heads=1",
        "sft.examples=4",
        "sft.steps=1",
        "sft.batch_size=4",
        "training.steps=1",
        "training.rollouts_per_update=4",
        "algorithm.kwargs.group_size=2",
        "eval.episodes=4",
    ]
    done = ludic("train", "tic-tac-toe", *small, "--out", "run")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"win_before", "win_after_sft", "win_after_rl"} <= summary.keys()
    for word in ("win", "draw", "loss", "illegal", "parse failure", "Try next"):
        assert word in done.out


def test_a_dry_run_prints_the_resolved_run_and_makes_nothing(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    done = ludic("train", letters, "training.learning_rate=1e-4", "--dry-run")
    resolved = json.loads(done.out)
    assert done.code == 0
    assert resolved["training"]["learning_rate"] == 1e-4
    (env,) = resolved["env"]
    wanted = {"kind": "letters:Letters", "kwargs": {}, "weight": 1.0}
    assert env == {**wanted, "name": None, "isolation": None}
    assert resolved["eval"]["seed"] == 1_000_003
    made = {path.name for path in tmp_path.iterdir()} - before
    assert made <= {"__pycache__"}  # Python's own, of the run's environment


def test_what_a_dry_run_prints_is_itself_a_run(ludic: Ludic, letters: Path) -> None:
    from ludic.runs.settings import check_run, load_run

    resolved = json.loads(ludic("train", letters, "--dry-run").out)
    assert check_run(resolved) == load_run(letters)


def test_sft_is_the_supervised_part_alone(ludic: Ludic, letters: Path, tmp_path: Path) -> None:
    done = ludic("sft", letters, "--out", "taught")
    assert done.code == 0, done.err
    folder = tmp_path / "taught"
    assert (folder / "checkpoints" / "sft" / "latest").is_file()
    assert not (folder / "checkpoints" / "rl").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert "right_after_sft" in summary
    assert "right_after_rl" not in summary


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(
    ludic: Ludic, letters: Path, tmp_path: Path, trained: Path
) -> None:
    def weights(folder: Path) -> bytes:
        model = folder / "checkpoints" / "rl" / "step-00000004" / "model"
        return (model / "model.safetensors").read_bytes()

    ludic("train", letters, "run.seed=1", "--out", "other")
    assert weights(tmp_path / "other") != weights(trained)


def test_an_aggregation_that_the_run_names_scales_the_gradient(
    ludic: Ludic, letters: Path, tmp_path: Path, trained: Path
) -> None:
    """Constant(1000) divides by 1000 where a mean divides by the tokens of an answer, at most 4."""

    def norm(path: Path) -> float:
        return float(json.loads(path.read_text().splitlines()[0])["train/grad_norm"])

    spec = "{kind = 'constant', length = 1000}"
    assert ludic("sft", letters, f"sft.aggregation={spec}", "--out", "sft").code == 0
    assert 0 < norm(tmp_path / "sft/sft/metrics.jsonl") < norm(trained / "sft/metrics.jsonl") / 100
    change = [f"algorithm.kwargs.aggregation={spec}", "training.steps=1"]
    assert ludic("train", letters, *change, "--out", "rl").code == 0
    assert 0 < norm(tmp_path / "rl/metrics.jsonl") < norm(trained / "metrics.jsonl") / 100


def test_evaluation_during_training_is_in_the_metrics(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    done = ludic("train", letters, "eval.every=2", "training.steps=2", "--out", "run")
    assert done.code == 0, done.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines if "eval/success" in line]
    assert [line["eval/step"] for line in measured] == [2]
    assert (tmp_path / "run" / "eval" / "step-2.json").is_file()


def test_a_finished_run_can_go_on_for_more_steps_and_is_measured_again(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    before = (folder / "eval" / "after_rl.json").read_text()
    done = ludic("train", "--resume", folder, "training.steps=8", "training.checkpoint_every=4")
    assert done.code == 0, done.err
    assert (folder / "checkpoints" / "rl" / "latest").read_text() == "step-00000008"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 8
    assert (folder / "eval" / "after_rl.json").read_text() != before


def test_a_run_of_an_earlier_version_goes_on_in_its_own_file(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    """Its log is compressed with gzip, a member for every rollout."""
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    log, old = (folder / "rollouts" / f"train.jsonl.{end}" for end in ("zst", "gz"))
    old.write_bytes(b"".join(gzip.compress(line) for line in _lines_of_schema_1_and_2(log)))
    log.unlink()
    (folder / "checkpoints/rl/latest").write_text("step-00000003")
    shutil.rmtree(folder / "checkpoints/rl/step-00000004")
    done = ludic("train", "--resume", folder, "training.steps=5")
    assert done.code == 0, done.err
    assert not log.exists()
    rollouts = list(read_rollouts(old, on_cut="error"))
    steps = Counter(rollout.id.partition("/")[0] for rollout in rollouts)
    assert steps == {f"step-{n}": 8 for n in range(5)}
    first = list(read_rollouts(trained / "rollouts" / "train.jsonl.zst"))
    assert rollouts[: 3 * 8] == first[: 3 * 8]  # these steps were kept, the fourth was repeated
    assert ludic("replay", old, "--limit", 2).code == 0


def _lines_of_schema_1_and_2(log: Path) -> list[bytes]:
    rollouts = list(read_rollouts(log))
    rows = [rollout_row(rollout) for rollout in rollouts]
    for row, rollout in zip(rows[::2], rollouts[::2], strict=True):
        row |= {"schema": 1, "rollout": to_json(rollout).decode()}
    return [json.dumps(row).encode() + b"\n" for row in rows]


def test_more_steps_under_a_schedule_are_said_to_move_the_learning_rate(
    ludic: Ludic, letters: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = ["training.schedule=linear", "training.steps=2", "sft.steps=1", "eval.episodes=4"]
    assert ludic("train", letters, *short, "--out", "run").code == 0
    assert ludic("train", "--resume", tmp_path / "run").code == 0
    assert caplog.messages == []
    assert ludic("train", "--resume", tmp_path / "run", "training.steps=3").code == 0
    assert ["total_steps=3 (was 2)" in message for message in caplog.messages] == [True]


def test_resuming_a_finished_run_trains_nothing_and_says_the_same(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    done = ludic("train", "--resume", folder)
    assert done.code == 0, done.err
    before, after = (json.loads((path / "summary.json").read_text()) for path in (trained, folder))
    assert {**before, "seconds": 0} == {**after, "seconds": 0}
