"""`ludic pipeline status`: an answer at once, and the right one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludic.cli import sampling as command
from ludic.errors import ConfigError, PipelineError
from ludic.pipeline import PipelineConfig, TrainerLease
from ludic.pipeline.servers import RegisteredServer, record_role
from ludic.pipeline.status import COLUMNS, process_rows, read_status, status_table
from ludic.pipeline.store import Store
from ludic.plumbing.records import to_json
from ludic.runs.locate import read_run
from ludic.runs.pipeline.address import find_pipeline, write_address
from ludic.runs.run import Run
from ludic.runs.storage import RunFolder
from ludic.view.folders import RunPlace
from ludic.view.overview import processes


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

    assert "the evaluation before its training, and its actors start with" in said()
    evaluated(folder, "before")
    assert "in its cold start, or the evaluation after it, and its actors start with" in said()
    evaluated(folder, "after_sft")
    assert "RL has not begun, or was stopped" in said()
    (folder / "checkpoints" / "rl" / f"step-{config.training.steps:06d}").mkdir(parents=True)
    assert "in the evaluation after RL: its actors have left" in said()
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


@pytest.fixture
def working(config: PipelineConfig, store: Store) -> Iterator[Store]:
    """A run with a trainer, an actor, two servers, and what a launch has recorded."""
    lease = TrainerLease(config)
    lease.acquire()
    lease.announce(3)
    beat = {"groups": 5, "tokens": 700, "busy": 2, "version": 3, "host": "node-a"}
    store.run("beat", "actor-1", json.dumps(beat))
    for name, version in (("server-1", 3), ("", None)):
        url = f"http://node-b:{8000 + len(name)}"
        server = RegisteredServer(url, "start", "tiny", 64, version, "node-b", 1, name)
        store.run("note", "servers", url, to_json(server).decode())
    record_role(store, "actor-1", "node-x", "running", 1)
    record_role(store, "actor-1", "node-c", "restarted", 2)
    record_role(store, "actor-2", "", "waits for a node with 1 CPU", 0)
    yield store
    lease.close()


@pytest.mark.redis
def test_one_table_has_every_process_with_node_restarts_version_and_what_it_waits_for(
    working: Store,
) -> None:
    before = read_status(working)
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in process_rows(before)}
    assert list(rows) == ["trainer", "http://node-b:8000", "server-1", "actor-1", "actor-2"]
    actor = rows["actor-1"]
    assert (actor["node"], actor["restarts"], actor["version"]) == ("node-c", "2", "3")
    assert actor["work"] == "5 groups, 2 under way, 700 tokens"
    assert rows["actor-2"]["state"] == "waits for a node with 1 CPU"
    assert rows["server-1"]["waits for"] == ""
    assert rows["http://node-b:8000"]["waits for"] == "a publish"
    working.run("beat", "actor-1", json.dumps({"groups": 6, "tokens": 900, "version": 3}))
    after = read_status(working)
    rate = 200 / (after.now_s - before.now_s)
    assert f"{rate:.0f} tokens/s" in process_rows(after, before)[3][5]


@pytest.mark.redis
def test_the_run_page_shows_the_same_to_whom_the_address_belongs(
    working: Store, folder: Path
) -> None:
    place = RunPlace("run", folder, folder.parent)
    assert processes(place) is None, "no Redis at the moment"
    address = write_address(folder, working.config)
    page = processes(place)
    assert page is not None
    assert page["rows"] == process_rows(read_status(working))
    address.chmod(0o644)
    assert processes(place) is None, "others could have written it"
    address.write_text(json.dumps({"url": f"unix://{folder}/nobody.sock", "name": "run"}))
    address.chmod(0o600)
    assert "cannot be asked" in str(processes(place))
