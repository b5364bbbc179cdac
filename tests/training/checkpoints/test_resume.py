"""A run that is killed at any moment ends with the weights of one that never was."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.forked import start
from tests.training import resumable_run

SCRIPT = Path(resumable_run.__file__)
pytestmark = pytest.mark.integration


def finish(folder: Path, mode: str, steps: int) -> bytes:
    """Trains to the end in this process, which saves a start of torch."""
    resumable_run.main(folder, steps, mode)
    return (folder / "weights.safetensors").read_bytes()


def kill_and_resume(
    folder: Path, kills: int, mode: str, seed: int, steps: int
) -> tuple[bytes, int]:
    """Kills the run `kills` times, each a random while after one of its steps, however quick they
    are; says how many kills came before its end."""
    rng, landed = random.Random(seed), 0
    metrics, log = folder / "metrics.jsonl", folder.with_suffix(".log")
    for _ in range(kills):
        step = len(lines(metrics)) + rng.randint(1, steps // (kills + 1))
        process = start(SCRIPT, folder, steps, mode, printed=log)
        while process.is_alive() and len(lines(metrics)) < step:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.05))
        process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
        landed += process.exitcode != 0
    return finish(folder, mode, steps), landed


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.timeout(300)
def test_three_kills_change_no_bit(tmp_path: Path) -> None:
    undisturbed = finish(tmp_path / "undisturbed", "plain", 16)
    weights, landed = kill_and_resume(tmp_path / "killed", 3, "plain", seed=0, steps=16)
    assert landed, "no kill came before the end"
    assert weights == undisturbed
    steps = [json.loads(line)["step"] for line in lines(tmp_path / "killed/metrics.jsonl")]
    assert steps == list(range(1, 17))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["plain", "background", "host"])
def test_twenty_kills_change_no_bit(tmp_path: Path, mode: str) -> None:
    undisturbed = finish(tmp_path / "undisturbed", mode, 40)
    landed, attempt = 0, 0
    while landed < 20:
        attempt += 1
        folder = tmp_path / f"killed-{attempt}"
        weights, hits = kill_and_resume(folder, 4, mode, seed=attempt, steps=40)
        landed += hits
        assert weights == undisturbed
        assert attempt < 20
