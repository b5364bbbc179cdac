"""`ludic pipeline status`: an answer at once, and the right one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludic.cli import sampling as command
from ludic.errors import ConfigError, PipelineError
from ludic.pipeline import PipelineConfig
from ludic.pipeline.store import Store
from ludic.runs.locate import read_run
from ludic.runs.pipeline.address import find_pipeline
from ludic.runs.pipeline.status import read_status, status_table
from ludic.runs.run import Run
from ludic.runs.storage.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has begun."""
    monkeypatch.delenv("LUDIC_REDIS_URL", raising=False)
    config = Run.from_file("tic-tac-toe", ["pipeline={}"]).config
    RunFolder(tmp_path / "run").make(config, modules=tmp_path)
    return tmp_path / "run"


def evaluated(folder: Path, stage: str) -> None:
    (folder / "eval").mkdir(exist_ok=True)
    (folder / "eval" / f"{stage}.json").write_text("{}")


def test_a_redis_that_is_dead_is_said_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ANSWER_S", 0.5)
    address = {"url": f"unix://{folder / 'nobody.sock'}", "name": "run"}
    (folder / "pipeline.json").write_text(json.dumps(address))
    began = time.monotonic()
    seen = CliRunner().invoke(command.pipeline, ["status", str(folder), "--once"])
    assert isinstance(seen.exception, PipelineError)
    assert "for Redis at unix:" in str(seen.exception)
    assert time.monotonic() - began < 60, "and not after the 300 s that a run is patient for"


def test_status_says_which_part_of_the_run_has_no_actors(folder: Path) -> None:
    config, _, _ = read_run(str(folder))

    def said() -> str:
        with pytest.raises(PipelineError) as caught:
            find_pipeline(config, folder)
        return str(caught.value)

    assert "the evaluation before its training, and its actors come with" in said()
    evaluated(folder, "before")
    assert "in its cold start, or the evaluation after it, and its actors come with" in said()
    evaluated(folder, "after_sft")
    assert "it is before its reinforcement, or was stopped in it" in said()
    (folder / "checkpoints" / "rl" / f"step-{config.training.steps:06d}").mkdir(parents=True)
    assert "in the evaluation after its reinforcement: its actors have left" in said()
    (folder / "summary.json").write_text("{}")
    assert "it has ended" in said()


@pytest.mark.redis
def test_status_of_a_run_that_no_trainer_has_opened_says_so(
    config: PipelineConfig, store: Store
) -> None:
    from rich.console import Console

    console = Console(width=120, record=True)
    console.print(status_table(read_status(store), run="it is in its cold start"))
    text = console.export_text()
    assert "none has opened the run on this Redis yet" in text
    assert "it is in its cold start" in text
    assert "gone" not in text


def test_a_password_in_an_argument_is_refused_and_not_repeated() -> None:
    config, _, _ = read_run("tic-tac-toe")
    with pytest.raises(ConfigError, match="LUDIC_REDIS_URL") as caught:
        find_pipeline(config, None, "redis://:secret@host:6379")
    assert "secret" not in str(caught.value)
    assert find_pipeline(config, None, "redis://host:6379").url == "redis://host:6379"
