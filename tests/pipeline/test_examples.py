"""The example of actors and trainer, and the demo over Redis, as a user runs them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.pipeline import LocalRedis
from tests.forked import Forked

pytestmark = [pytest.mark.redis, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(300)
def test_the_example_trains_on_what_its_actor_samples(tmp_path: Path, server: LocalRedis) -> None:
    options = ["--run", "example", "--folder", str(tmp_path), "--steps", "3"]
    folder = ROOT / "examples" / "pipeline_rl"
    url = {"LUDIC_REDIS_URL": server.url}  # not in `ps`
    actor, trainer = (
        Forked(folder / name, *options, where=tmp_path, environment=url)
        for name in ("run_actor.py", "run_trainer.py")
    )
    try:
        said, _ = trainer.communicate(timeout=280)
        assert trainer.returncode == 0, said
        heard, _ = actor.communicate(timeout=60)
    finally:
        actor.kill()
        trainer.kill()
    assert [line.split(":")[0] for line in said.splitlines() if line.startswith("update")] == [
        *("update 1", "update 2", "update 3")
    ]
    assert "left because the run has ended: its updates are done" in heard


def test_the_examples_model_is_on_the_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "pipeline_rl"))
    run_trainer = importlib.import_module("run_trainer")
    monkeypatch.setattr(run_trainer, "device", lambda: "meta")
    assert {p.device.type for p in run_trainer.load_model("tiny").parameters()} == {"meta"}
    monkeypatch.setattr(sys, "argv", ["run_trainer.py", "--port", "8000"])
    assert run_trainer.arguments().port == 8000


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_demo_over_redis_ends_within_the_interval_of_the_synchronous_one(
    tmp_path: Path,
) -> None:
    rates = {}
    for how in ("sync", "async"):
        command = [sys.executable, "-m", "ludic", "train", "tic-tac-toe"]
        command += ["--out", str(tmp_path / how), 'logging.loggers=["console"]']
        subprocess.run(
            [*command, *(["--async"] if how == "async" else [])],
            cwd=tmp_path,
            env=ENVIRONMENT,
            check=True,
            timeout=1400,
        )
        summary = json.loads((tmp_path / how / "summary.json").read_text())
        rates[how] = summary["win_after_rl"]
    assert rates["async"]["high"] >= rates["sync"]["low"]
    assert rates["async"]["low"] <= rates["sync"]["high"]
    assert rates["async"]["value"] > 0.5
