"""A run that is killed at any moment ends with the weights of one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training import resumable_run

ROOT = Path(__file__).parents[3]
STEPS = 40
pytestmark = pytest.mark.integration


def start(folder: Path, mode: str) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.training.resumable_run", str(folder), str(STEPS), mode]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def finish(folder: Path, mode: str) -> bytes:
    """Trains to the end in this process, which saves a start of torch."""
    resumable_run.main(folder, STEPS, mode)
    return (folder / "weights.safetensors").read_bytes()


def kill_and_resume(folder: Path, kills: int, mode: str, seed: int) -> tuple[bytes, int]:
    """Kills the run `kills` times, each a random while after training began."""
    rng, landed = random.Random(seed), 0
    for _ in range(kills):
        process = start(folder, mode)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(rng.uniform(0.0, 1.0))
        landed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    return finish(folder, mode), landed


@pytest.mark.timeout(300)
def test_three_kills_change_no_bit(tmp_path: Path) -> None:
    undisturbed = finish(tmp_path / "undisturbed", "plain")
    weights, landed = kill_and_resume(tmp_path / "killed", 3, "plain", seed=0)
    assert landed, "no kill came before the end"
    assert weights == undisturbed
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "killed/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["plain", "background", "host"])
def test_twenty_kills_change_no_bit(tmp_path: Path, mode: str) -> None:
    undisturbed = finish(tmp_path / "undisturbed", mode)
    landed, attempt = 0, 0
    while landed < 20:
        attempt += 1
        folder = tmp_path / f"killed-{attempt}"
        weights, hits = kill_and_resume(folder, 4, mode, seed=attempt)
        landed += hits
        assert weights == undisturbed
        assert attempt < 20
