"""The benchmark that judges plans: it fits the shipped profile, and reads runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gsm8k import readme_tables
from benchmarks.plan import figures, main
from benchmarks.plan_judge import judged_lines, name_of
from benchmarks.plan_own import Line, fitted, solved, with_decoding, with_passes
from ludic.plan.profile import load_profile
from ludic.runs.settings import check_run

H200 = load_profile("h200")
LOOP: dict[str, Any] = {
    **{"benchmark": "loop", "task": "gsm8k", "model": "qwen15", "shape": None, "lora": None},
    **{"turns": 1, "episodes": 128, "group": 8, "max_tokens": 512, "mean_tokens": 309.0},
    **{"step_s": 2.2, "wait_s": 1.25, "train_s": 0.9, "publish_s": 0.0001, "peak_gb": 78.0},
    **{"torch_peak_gb": 72.0, "row_tokens": 459.0, "context": 1024},
}


def test_the_shipped_profile_of_the_h200_is_what_steps_and_passes_fit() -> None:
    again = with_passes(with_decoding(H200))
    for name, figure in H200.figures.items():
        assert again[name] == pytest.approx(figure.value, rel=1e-3, abs=1e-20), name


@pytest.mark.slow
def test_the_shipped_profile_of_the_h200_is_what_all_rows_fit() -> None:
    again = fitted(H200)
    for name, figure in H200.figures.items():
        assert again[name] == pytest.approx(figure.value, rel=1e-3, abs=1e-20), name


def run_folder(path: Path, updates: int) -> None:
    """A run of the README's GSM8K that took as long as `LOOP` says."""
    tables = readme_tables()
    tables["model"] = {"name": "qwen15", "device": "cuda"}
    path.mkdir()
    (path / "run.json").write_text(json.dumps(check_run(tables).plain(), default=str))
    (path / "origin.json").write_text(json.dumps({"machine": {"gpu": "NVIDIA H200"}}))
    line = {
        **{"train/completion_tokens_mean": 309.0, "train/completion_tokens_max": 512.0},
        **{"train/item_tokens_mean": 459.0, "train/turns_mean": 1.0},
        **{"perf/wait_for_batch_s": 1.25, "perf/forward_backward_s": 0.88},
        **{"perf/optimizer_s": 0.02, "perf/publish_s": 0.0001, "perf/gpu_mem_peak_mb": 68_665.0},
        "perf/tokens_computed": 128 * 309.0 + 16 * 150,
    }
    lines = [
        json.dumps(line | {"perf/elapsed_s": 2.2 * n, "train/step": n}) for n in range(updates)
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines))


def test_a_run_folder_and_the_loops_benchmark_are_judged_alike(tmp_path: Path) -> None:
    run_folder(tmp_path / "run", 8)
    run_folder(tmp_path / "short", 3)
    (tmp_path / "loop.log").write_text(f"seconds of each update: 2.2\n{json.dumps(LOOP)}\n")
    lines, left_out = judged_lines(tmp_path, H200)
    found = {(line.group, line.name.split()[0]): line for line in lines}
    for phase in ("update", "waiting", "passes", "memory of torch"):
        run, loop = found[f"run: {phase}", "run"], found[f"run: {phase}", "loop"]
        assert run.measured == pytest.approx(loop.measured, rel=0.01)
        assert run.predicted == pytest.approx(loop.predicted, rel=0.05), phase
    assert ("run: publishing", "run") not in found
    assert len(left_out) == 1
    assert "too few" in left_out[0]


def test_steps_and_memory_of_benchmarks_are_judged(tmp_path: Path) -> None:
    facts = {"1.5b_lora16_128_rows_ms": 2.8, "context": 320}
    (tmp_path / "a.json").write_text(json.dumps(facts, indent=1))
    (tmp_path / "b.txt").write_text('{"7b_lora16": {"predicted_gb": 31.5, "peak_gb": 31.9}}\n{no')
    lines, _ = judged_lines(tmp_path, H200)
    assert [(line.group, line.measured) for line in lines] == [
        ("decode step", 2.8),
        ("update's memory", 31.9),
    ]
    assert abs(lines[0].error) < 0.15


def test_models_are_known_by_their_folders() -> None:
    names = ["/x/smollm2", "qwen05", "Qwen2.5-Coder-1.5B-Instruct", "qwen15", "7b"]
    assert [name_of(name).rpartition("-")[2] for name in names] == [
        *("135M", "0.5B", "1.5B", "1.5B", "7B")
    ]


def test_only_rows_of_a_use_count_and_ratios_stand_apart() -> None:
    lines = [
        Line("passes", "a", 1.1, 1.0),
        Line("passes", "b", 3.0, 1.0, "fitted"),
        Line("passes", "c", 0.5, 1.0),
        Line("async : sync", "d", 0.4, 0.5),
    ]
    found = figures(lines, "judged")
    assert (found["judged"], found["within_15_percent"], found["worst"]) == (2, 1, -0.5)
    assert found["ratios"] == {"d": [0.4, 0.5]}


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(SystemExit, match="no folder"):
        main(["--judge", "nowhere"])


def test_a_growing_function_is_solved() -> None:
    assert solved(lambda x: x * x, 9.0, 0.0, 10.0) == pytest.approx(3.0, rel=0.05)
