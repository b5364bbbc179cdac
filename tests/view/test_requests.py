"""Requests that make no sense, and an index that cannot be read, are answered with a sentence."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from ludic.runs.settings.run import SCHEMA
from ludic.view.index import RunIndex
from tests.view.made import make_run
from tests.view.serving import Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("shown")
    make_run(folder / "runs" / "first")
    with serving(folder / "runs") as found:
        found.indexed("first", 16)
        yield found


NO_COUNTS = ["inf", "-inf", "nan", "1e999", "1e3", "2.5", "-1", "1_0", "0x10", "9" * 40, "x", "٣"]


@pytest.mark.parametrize("text", NO_COUNTS)
@pytest.mark.parametrize("question", ["rollouts", "curve"])
def test_a_count_is_a_whole_number_and_nothing_else(
    served: Served, question: str, text: str
) -> None:
    keys = ("most",) if question == "curve" else ("offset", "limit")
    for key in keys:
        status, _, body = served.get(
            f"/api/{question}?run=first&key=train/loss&{key}={quote(text)}"
        )
        assert status == 400, body
        assert f"{key}: " in json.loads(body)["error"]


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e999", "x"])
@pytest.mark.parametrize(
    ("question", "key"), [("curve", "low"), ("curve", "high"), ("rollouts", "reward.min")]
)
def test_a_bound_is_a_finite_number(served: Served, question: str, key: str, text: str) -> None:
    status, _, body = served.get(f"/api/{question}?run=first&key=train/loss&{key}={text}")
    assert status == 400, body
    assert "number" in json.loads(body)["error"]


def test_numbers_that_make_sense_are_answered(served: Served) -> None:
    assert len(served.ask("rollouts", run="first", offset=2, limit=3)["rows"]) == 3
    assert served.ask("rollouts", run="first", offset=10**14)["rows"] == []
    (curve,) = served.ask("curve", run="first", key="train/loss", low="-1e3", high=3.5, most=2)
    assert [point[0] for point in curve["points"]] == [1.0, 3.0]


@pytest.mark.parametrize(
    "path",
    [
        "/api/rollouts?run=first",
        "/api/facets?run=first",
        "/api/histogram?run=first",
        "/api/state?run=first",
        "/api/rollout?run=first&id=step-0/0",
        "/export/rollout?run=first&id=step-0/0",
    ],
)
def test_an_index_that_cannot_be_read_is_said(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    @contextmanager
    def broken(self: RunIndex) -> Iterator[Any]:
        raise sqlite3.DatabaseError("database disk image is malformed")
        yield

    monkeypatch.setattr(RunIndex, "reading", broken)
    status, _, body = served.get(path)
    assert status == 503
    assert b"index of the run cannot be read now: database disk image is malformed" in body


def test_metrics_that_were_cut_are_noticed(tmp_path: Path, serve: Callable[..., Served]) -> None:
    root = tmp_path / "runs"
    names = ("whole", "half", "gap")
    for name in names:
        run = make_run(root / name)
        latest = run / "checkpoints" / "rl" / "latest"
        latest.parent.mkdir(parents=True)
        latest.write_text("step-00000004")
        metrics = run / "metrics.jsonl"
        data = metrics.read_bytes()
        if name == "half":
            metrics.write_bytes(data[: len(data) // 2 + 5])
        elif name == "gap":
            lines = data.splitlines(keepends=True)
            metrics.write_bytes(b"".join([lines[0], *lines[2:]]))
    cards = {card["name"]: card["problems"] for card in serve(root).ask("runs")["runs"]}
    assert cards["whole"] == []
    assert cards["half"] == [
        "metrics.jsonl: its last line is cut",
        "metrics.jsonl: it ends at step 2, and there is a checkpoint of step 4: it was cut",
    ]
    assert cards["gap"] == [
        "metrics.jsonl: 1 steps between the first and the last have no line",
    ]


def test_settings_of_the_schema_that_runs_write_are_shown_whole(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    for name, schema in (("now", SCHEMA), ("later", SCHEMA + 1)):
        file = make_run(tmp_path / name) / "run.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "schema": schema}))
    problems = {card["name"]: card["problems"] for card in serve(tmp_path).ask("runs")["runs"]}
    assert problems["now"] == []
    assert [f"schema {SCHEMA + 1}" in problem for problem in problems["later"]] == [True]
