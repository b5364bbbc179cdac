"""The index: brought up to date as files grow, and never stopped by what is wrong with them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from ludic.rollouts.lines import Block, Damage, as_stored, read_block, whole_blocks
from ludic.rollouts.storage import RolloutWriter, rollout_row
from ludic.view.folders import Folders, RunPlace
from ludic.view.index import FILE, RunIndex
from tests.view.made import make_run, rollout, training


def place(folder: Path) -> RunPlace:
    return RunPlace(folder.name, folder.resolve(), folder.resolve())


def ids(index: RunIndex) -> list[str]:
    with index.reading() as db:
        return [row["id"] for row in db.execute("SELECT id FROM rollouts ORDER BY n")]


def notes(index: RunIndex) -> list[str]:
    with index.reading() as db:
        return [row["what"] for row in db.execute("SELECT what FROM notes")]


def line(name: str) -> bytes:
    return json.dumps(rollout_row(rollout(name))).encode() + b"\n"


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz", ".jsonl"])
def test_an_index_follows_a_growing_file(tmp_path: Path, suffix: str) -> None:
    folder = make_run(tmp_path / "run", training(1), tokens=False, suffix=suffix)
    index = RunIndex(place(folder))
    assert index.update() == 4
    assert index.update() == 0
    with RolloutWriter(folder / "rollouts" / f"train{suffix}", append=True) as writer:
        writer.write(rollout("step-9/0/0"))
    assert index.update() == 1
    assert ids(index)[-1] == "step-9/0/0/agent"
    again = RunIndex(place(folder))
    assert again.update() == 0
    assert len(ids(again)) == 5


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz", ".jsonl"])
def test_only_whole_blocks_are_taken(tmp_path: Path, suffix: str) -> None:
    folder = make_run(tmp_path / "run", [], tokens=False)
    path = folder / "rollouts" / f"more{suffix}"
    first, second = as_stored(path, line("step-0/0")), as_stored(path, line("step-1/0"))
    path.write_bytes(first + second[:-9])
    index = RunIndex(place(folder))
    assert index.update() == 1
    path.write_bytes(first + second)
    assert index.update() == 1
    assert ids(index) == ["step-0/0/agent", "step-1/0/agent"]
    assert notes(index) == []


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
def test_a_damaged_block_is_noted_and_the_rest_is_there(tmp_path: Path, suffix: str) -> None:
    folder = make_run(tmp_path / "run", [], tokens=False)
    path = folder / "rollouts" / f"more{suffix}"
    blocks = [as_stored(path, line(f"step-{i}/0")) for i in range(4)]
    broken = bytearray(blocks[1])
    broken[20:60] = bytes(40)
    path.write_bytes(blocks[0] + broken + blocks[2] + blocks[3])
    index = RunIndex(place(folder))
    index.update()
    assert ids(index) == ["step-0/0/agent", "step-2/0/agent", "step-3/0/agent"]
    assert len(notes(index)) == 1
    assert "cannot be read" in notes(index)[0]


def test_lines_that_are_no_rollouts_and_newer_ones_are_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [], tokens=False)
    newer = json.dumps({**rollout_row(rollout("step-1/0")), "schema": 99}).encode() + b"\n"
    (folder / "rollouts" / "more.jsonl").write_bytes(
        line("step-0/0") + b"{broken\n" + b"[1, 2]\n" + newer + newer + line("step-2/0")
    )
    index = RunIndex(place(folder))
    index.update()
    assert ids(index) == ["step-0/0/agent", "step-2/0/agent"]
    found = notes(index)
    assert sum("schema 99" in note for note in found) == 1
    assert sum("line" in note for note in found) == 2


def test_a_file_that_a_resumed_run_rewrote_is_indexed_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", training(4), tokens=False)
    index = RunIndex(place(folder))
    assert index.update() == 16
    path = folder / "rollouts" / "train.jsonl.zst"
    path.rename(path.with_name("old"))
    with RolloutWriter(path) as writer:
        for each in training(2):
            writer.write(each)
    index.update()
    assert len(ids(index)) == 8
    assert len(set(ids(index))) == 8


@pytest.mark.parametrize("content", [b"not a database", b""])
def test_an_index_that_is_none_is_made_anew(tmp_path: Path, content: bytes) -> None:
    folder = make_run(tmp_path / "run", training(1), tokens=False)
    (folder / FILE).write_bytes(content)
    index = RunIndex(place(folder))
    assert index.update() == 4


def test_an_index_of_another_version_is_made_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", training(1), tokens=False)
    db = sqlite3.connect(folder / FILE)
    db.executescript("CREATE TABLE rollouts (other); PRAGMA user_version=77;")
    db.close()
    index = RunIndex(place(folder))
    assert index.update() == 4


def test_rewards_that_are_not_finite_and_halves_of_surrogates_are_taken(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [], tokens=False)
    row = rollout_row(rollout("step-0/0", reward=1.0))
    row["total_reward"] = None
    for name in ("reward", "env"):  # as other programs may have written it
        assert f'"{name}":1.0' in row["rollout"]
        row["rollout"] = row["rollout"].replace(f'"{name}":1.0', f'"{name}":NaN')
    row["messages"][0]["content"] = "half \ud800 of a pair"
    (folder / "rollouts" / "more.jsonl").write_bytes(json.dumps(row).encode() + b"\n")
    index = RunIndex(place(folder))
    index.update()
    with index.reading() as db:
        found = db.execute("SELECT reward, components FROM rollouts").fetchone()
    assert found["reward"] is None
    assert json.loads(found["components"]) == {"parser": 0.0}


def test_every_block_can_be_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    texts = [line(f"step-{i}/0") * (i + 1) for i in range(5)]
    path.write_bytes(b"".join(as_stored(path, text) for text in texts))
    found = [piece for piece in whole_blocks(path) if isinstance(piece, Block)]
    assert [block.text for block in found] == texts
    assert [read_block(path, b.start, b.length) for b in reversed(found)] == texts[::-1]
    assert not any(isinstance(piece, Damage) for piece in whole_blocks(path))
    with pytest.raises(ValueError, match="changed"):
        read_block(path, found[1].start + 1, found[1].length)


def test_folders_without_runs_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "runs" / "deep" / "first")
    folders = Folders([tmp_path / "empty", tmp_path / "runs", tmp_path / "missing"])
    assert list(folders.runs()) == ["deep/first"]
    assert any("empty" in problem for problem in folders.problems)
    assert any("missing" in problem for problem in folders.problems)
