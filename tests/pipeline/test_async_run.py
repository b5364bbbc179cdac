"""`ludic train --async`, `ludic actor` and `ludic pipeline status`, as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from ludic.cli.training import train
from ludic.errors import ConfigError, PipelineError
from ludic.pipeline.local_redis import LocalRedis
from ludic.rollouts import read_rollouts, read_token_log
from ludic.runs.episodes import requests_of
from ludic.runs.locate import read_run
from ludic.runs.pipeline.acting import accepted
from ludic.runs.run import Run
from ludic.runs.storage import rollout_file, token_file
from ludic.types import EnvSpec, ProtocolSpec
from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("sft.steps=0", "training.steps=2", "training.rollouts_per_update=16"),
    *("training.checkpoint_every=1", "eval.episodes=8", 'logging.loggers=["console"]'),
)


def ludic(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ludic", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.redis
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_one_command_starts_everything_shows_it_and_ends_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("train", "tic-tac-toe", "--async", "--out", out, "pipeline.actors=1", *SMALL)
    run = Forked("ludic", *words, where=tmp_path, environment=environment())
    try:
        while not (out / "pipeline.json").is_file() and run.poll() is None:
            time.sleep(0.1)
        address = out / "pipeline.json"
        if run.poll() is None and address.is_file():
            assert address.stat().st_mode & 0o077 == 0, "it has the password"
            seen = subprocess.run(
                ludic("pipeline", "status", str(out), "--json"),
                env=environment(),
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if seen.returncode == 0:  # unless the run was over by then
                assert json.loads(seen.stdout)["attempt"] == 1
        output, _ = run.communicate(timeout=500)
    finally:
        run.kill()
    assert run.returncode == 0, output
    assert "1 actors, one trainer" in output
    log = (out / "logs" / "actor-1.log").read_text()
    assert "left because" in log
    assert not address.exists()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/step" in line]
    assert [line["train/step"] for line in steps] == [1.0, 2.0]
    assert all(line["train/pipeline_lag_max"] <= 1 for line in steps)
    kept = {rollout.id for rollout in read_rollouts(rollout_file(out / "rollouts", "train"))}
    trained = list(read_token_log(token_file(out / "rollouts")))
    assert {record.update for record in trained} == {1, 2}
    assert {record.rollout_id for record in trained} <= kept


def test_without_a_redis_server_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PipelineError, match="apt-get install redis-server"):
        LocalRedis(tmp_path)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("training.overlap=true", "actors sample ahead"),
        ("training.dynamic_sampling=2", "dynamic_sampling"),
    ],
)
def test_what_only_one_process_can_do_is_refused(setting: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Run.from_file("tic-tac-toe", ["pipeline={}", setting])


def test_the_table_that_a_run_file_has_stays_with_async(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        '[env]\nkind = "tic_tac_toe"\n[pipeline]\nactors = 8\nurl = "redis://127.0.0.1:1/0"\n'
    )
    for run, actors in (("run.toml", 8), ("tic-tac-toe", 3)):
        address = [] if run == "run.toml" else ["pipeline.actors=3", "pipeline.url=redis://h:1/0"]
        train(run, address, asynchronous=True, dry_run=True)
        assert json.loads(capsys.readouterr().out)["pipeline"]["actors"] == actors
    train("run.toml", ["pipeline.stale=drop"], asynchronous=True, dry_run=True)
    pipeline = json.loads(capsys.readouterr().out)["pipeline"]
    assert (pipeline["actors"], pipeline["stale"]) == (8, "drop")


def test_a_password_in_a_run_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="user or a password"):
        Run.from_file("tic-tac-toe", ['pipeline.url="redis://me:secret@host"'])


def test_an_actor_accepts_its_run_files_own_kinds_and_nothing_else() -> None:
    config, _, _ = read_run("tic-tac-toe")
    accepts = accepted(config)
    (request, _), *_ = requests_of(config).values()
    assert accepts(replace(request, env_seed=5, group_id="g")) is None
    parser = {"kind": "regex", "pattern": "(a+)+$"}
    for other in (
        replace(request, env=EnvSpec("key_door")),
        replace(request, env=EnvSpec(request.env.kind, {"opponent": "perfect"})),
        replace(request, protocol=ProtocolSpec("single_agent", {"parser": parser})),
        replace(request, protocol=ProtocolSpec("os:system")),
    ):
        assert "does not name" in (accepts(other) or "")
