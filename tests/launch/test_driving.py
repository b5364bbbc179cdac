"""A run has one driver; one that was lost with its host is not waited for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ludic.errors import ConfigError, DeadlineError, LaunchError, PipelineError
from ludic.runs.pipeline import launching
from ludic.runs.storage import RunFolder


def driven_elsewhere(path: Path) -> Path:
    """A run folder that a driver on another host has, or had."""
    (path / "launch").mkdir()
    holder = {"pid": 7, "host": "elsewhere", "boot": "another", "since": "yesterday"}
    (path / "launch" / ".lock").write_text(json.dumps(holder))
    return beat(path, 1)


def beat(path: Path, number: int) -> Path:
    state = path / "launch" / "state.json"
    state.write_text(json.dumps({"driver": {"pid": 7, "host": "elsewhere", "beats": number}}))
    return state


def clock(monkeypatch: pytest.MonkeyPatch, *, renews: Path | None = None) -> None:
    """Seconds that pass by sleeping; meanwhile the other driver renews its state, if it lives."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if renews is not None:
            beat(renews, round(10 * now[0]))

    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


@pytest.mark.parametrize(
    "failure",
    [
        PipelineError("it ended with status 1"),
        BrokenPipeError("it closed its input"),
        DeadlineError("its first answer", "redis-server", 10.0),
    ],
)
def test_a_redis_that_fails_to_start_again_is_told_and_tried_again(failure: Exception) -> None:
    class Ended:
        folder = Path("redis")
        process = SimpleNamespace(poll=lambda: 1, end=lambda: None)

        def start(self) -> None:
            raise failure

    launch: Any = object.__new__(launching.Launch)
    launch._redis, launch._redis_restarts = Ended(), 0
    told: list[str] = []
    launch._tell = lambda event: told.append(event.sentence)
    for _ in range(launching.REDIS_RESTARTS):
        launch._tend_redis()
    assert all(str(failure) in sentence for sentence in told)
    with pytest.raises(LaunchError, match="Redis ended"):
        launch._tend_redis()


def test_a_driver_whose_host_was_lost_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven_elsewhere(tmp_path)
    clock(monkeypatch)
    with launching.driving(RunFolder(tmp_path)):
        holder = json.loads((tmp_path / "launch" / ".lock").read_text())
        assert holder["host"] != "elsewhere"


def test_a_driver_on_another_host_that_is_heard_of_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven_elsewhere(tmp_path)
    clock(monkeypatch, renews=tmp_path)
    with (
        pytest.raises(ConfigError, match="process 7 on host elsewhere"),
        launching.driving(RunFolder(tmp_path)),
    ):
        pass


def test_a_driver_that_left_without_a_state_is_forgotten(tmp_path: Path) -> None:
    driven_elsewhere(tmp_path).unlink()
    with launching.driving(RunFolder(tmp_path)):
        assert (tmp_path / "launch" / ".lock").read_text()
