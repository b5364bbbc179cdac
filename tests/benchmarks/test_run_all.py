"""The runner of the benchmarks: which it finds, which it skips, and what it reads from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.run_all import Benchmark, discover, last_json


def test_a_benchmark_is_a_module_with_a_main_and_its_needs_are_read_without_importing_it(
    tmp_path: Path,
) -> None:
    body = '"""Counts.\n\nMore."""\nNEEDS = ("gpu", "vllm")\nimport no_such\ndef main(): ...\n'
    (tmp_path / "counting.py").write_text(body)
    (tmp_path / "shared_part.py").write_text('"""No benchmark."""\n')
    (tmp_path / "run_all.py").write_text("def main(): ...\n")
    assert discover(tmp_path) == [Benchmark("counting", "Counts.", ("gpu", "vllm"))]


def test_needs_that_are_not_met_are_named() -> None:
    assert Benchmark("b", "", ("json", "no_such_package")).lacks() == ["no_such_package"]


def test_the_figures_are_the_last_line() -> None:
    assert last_json('talk\n{"us": 3}\n\n') == {"us": 3}


@pytest.mark.parametrize("text", ["", "\n", "no figures", "[1]", '{"us": 3}\nmore talk'])
def test_output_without_figures_on_its_last_line_is_a_failure(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        last_json(text)


@pytest.mark.integration
def test_the_list_of_benchmarks_ends_with_json(repo_root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run_all", "--list"]
    done = subprocess.run(
        command, cwd=repo_root, capture_output=True, text=True, timeout=100, check=True
    )
    assert "step_cost" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == {}
