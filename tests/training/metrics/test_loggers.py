"""Loggers write what they are told, and none of them can stop a run."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ludic.errors import MissingExtraError
from ludic.training.metrics.loggers import (
    ConsoleLogger,
    JSONLLogger,
    MetricLog,
    RichLiveLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    sparkline,
)

STEP = {"train/step": 3.0, "train/loss": 0.25, "perf/step_s": 1.5}


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1
        raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("still gone")


def test_a_logger_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    log = MetricLog([broken], tmp_path, "run")
    for step in range(1, 7):
        log.write({"train/loss": float(step)}, step=step)
    log.close()
    assert broken.calls == 3
    assert "the server is gone" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_jsonl_is_valid_whatever_the_numbers_and_rewinds(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path / "deep" / "metrics.jsonl")
    for step, value in enumerate((1.0, float("nan"), float("inf")), start=1):
        logger.log({"train/loss": value}, step)
    with logger.path.open("a") as file:
        file.write('{"step": 4, "tra')  # the process died here
    logger.rewind(2)
    lines = [json.loads(line) for line in logger.path.read_text().splitlines()]
    assert lines == [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": None}]
    logger.log({"train/loss": 3.0}, 3)
    assert len(logger.path.read_text().splitlines()) == 3


@pytest.mark.parametrize("damage", ["cut", "binary", "nonsense"])
def test_a_resumed_run_says_that_its_metrics_were_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    log = MetricLog([], tmp_path, "run")
    for step in range(1, 9):
        log.write({"train/step": float(step), "train/loss": 1.0}, step=step)
    path = tmp_path / "metrics.jsonl"
    log.rewind(8)
    assert not caplog.messages  # nothing is missing
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    whole = {
        "cut": data[: len(data) // 2 + 3],
        "binary": b"".join([*lines[:4], b"\xff\x00\n", *lines[8:]]),
        "nonsense": b"".join([*lines[:4], b"3\n", b"[]\n", b"null\n", b"[" * 5000 + b"\n"]),
    }
    path.write_bytes(whole[damage])
    log.rewind(8)
    assert "no line for 4 of the 8 steps" in caplog.text
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    log.close()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = MetricLog([Broken()], tmp_path / "run", "run", writes=False)
    log.write({"train/loss": 1.0}, step=1)
    log.close()
    assert not (tmp_path / "run").exists()


def test_trainers_of_one_process_have_folders_of_their_own() -> None:
    first, second = (MetricLog([], None, "run").folder for _ in range(2))
    assert first != second


def test_the_console_shows_chosen_metrics_and_every_evaluation() -> None:
    stream = io.StringIO()
    logger = ConsoleLogger(every=2, stream=stream)
    logger.log(STEP, 3)
    logger.log(STEP, 4)
    logger.log({"eval/step": 5.0, "eval/accuracy": 0.5}, 5)
    assert stream.getvalue().splitlines() == [
        "step      4  loss 0.25  step_s 1.5",
        "eval      5  accuracy 0.5",
    ]


def test_sparklines_run_from_lowest_to_highest() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(100)), width=10)) == 10


def test_the_live_view_shows_progress_and_courses() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    logger = RichLiveLogger(total_steps=10, console=console)
    for step in (1, 2, 3):
        logger.log({"train/loss": float(step), "eval/accuracy": 0.5, "other": 1.0}, step)
    logger.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 3 of 10" in shown
    assert "train/loss" in shown
    assert "▁▅█" in shown
    assert "other" not in shown


def test_tensorboard_gets_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    logger.log(STEP, 3)
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(STEP)
    assert events.Scalars("train/loss")[0].step == 3


class FakeWandb(types.ModuleType):
    """Stands in for the service, which needs an account."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str]] = []
        self.lines: list[Mapping[str, float]] = []

    def init(self, **settings: Any) -> FakeWandb:
        self.started.append(settings)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, metrics: Mapping[str, float]) -> None:
        self.lines.append(metrics)

    def finish(self) -> None:
        self.started.append({"finished": True})


def test_wandb_takes_its_project_from_the_environment_and_has_step_axes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert WandbLogger().project == "Ludic"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    logger = WandbLogger(name="first")
    logger.log(STEP, 3)
    logger.close()
    assert fake.started[0]["project"] == "mine"
    assert ("train/*", "train/step") in fake.axes
    assert ("eval/*", "eval/step") in fake.axes
    assert fake.lines == [STEP]
    assert fake.started[-1] == {"finished": True}


class FakeTrackio(types.ModuleType):
    """Stands in for the package, which keeps its own store."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.started: list[dict[str, Any]] = []
        self.lines: list[tuple[Mapping[str, float], int]] = []

    def init(self, **settings: Any) -> FakeTrackio:
        self.started.append(settings)
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.lines.append((metrics, step))

    def finish(self) -> None:
        self.started.append({"finished": True})


def test_trackio_gets_the_finite_numbers_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    logger = TrackioLogger(name="first")
    logger.log({**STEP, "train/bad": float("nan")}, 3)
    logger.close()
    assert fake.started[0] == {"project": "Ludic", "name": "first", "config": {}}
    assert fake.lines == [(STEP, 3)]
    assert fake.started[-1] == {"finished": True}


@pytest.mark.parametrize(("name", "logger"), [("wandb", WandbLogger), ("trackio", TrackioLogger)])
def test_a_missing_package_names_the_extra(
    name: str, logger: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=name):
        logger()
