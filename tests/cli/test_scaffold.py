"""`ludic init` writes a package whose tests pass and whose run trains at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.runs.settings import EvalSection
from tests.cli.conftest import Ludic, environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

FEW = [
    "sft.examples=8",
    "sft.steps=2",
    "sft.batch_size=4",
    "training.steps=2",
    "training.rollouts_per_update=8",
    "eval.episodes=4",
]


@pytest.mark.parametrize(
    ("options", "tests"),
    [([], 3), (["--kind", "steps"], 4), (["--kind", "two-seats"], 5)],
)
def test_a_new_package_passes_its_own_tests(
    ludic: Ludic, tmp_path: Path, options: list[str], tests: int
) -> None:
    done = ludic("init", "my_env", *options)
    assert done.code == 0, done.err
    assert "cd my_env && ludic train run.toml" in done.out
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path / "my_env",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert f"{tests} passed" in tested.stdout


def test_a_new_package_trains_at_once(
    ludic: Ludic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ludic("init", "larger")
    monkeypatch.chdir(tmp_path / "larger")
    done = ludic("train", "run.toml", *FEW, "--out", "first")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "larger" / "first" / "summary.json").read_text())
    assert any(key.endswith("_after_rl") for key in summary)
    assert ludic("play", "larger:Larger", stdin="5\n").code == 0


@pytest.mark.parametrize("kind", ["single", "steps", "two-seats"])
def test_the_run_of_a_new_package_is_right_as_it_stands(
    ludic: Ludic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name = f"dry_{kind.replace('-', '_')}"
    ludic("init", name, "--kind", kind)
    monkeypatch.chdir(tmp_path / name)
    done = ludic("train", "run.toml", "--dry-run")
    assert done.code == 0, done.err
    resolved = json.loads(done.out)
    assert resolved["env"][0]["kind"].startswith(f"{name}:")
    assert resolved["eval"]["seed"] != EvalSection().seed  # its settings were chosen by those
    assert not (tmp_path / name / "runs").exists()


@pytest.mark.parametrize("kind", ["steps", "two-seats"])
def test_a_new_package_of_another_kind_trains_at_once(
    ludic: Ludic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name = f"walk_{kind.replace('-', '_')}"
    ludic("init", name, "--kind", kind)
    monkeypatch.chdir(tmp_path / name)
    done = ludic("train", "run.toml", *FEW, "--out", "first")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / name / "first" / "summary.json").read_text())
    assert any(key.endswith("_after_rl") for key in summary)


def test_an_unknown_kind_is_refused_with_the_nearest_one(ludic: Ludic, tmp_path: Path) -> None:
    done = ludic("init", "mine", "--kind", "two-seat")
    assert done.code == 2
    assert "'two-seats'" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "word"), [("my-env", "'my-env'"), ("class", "'class'"), ("tic_tac_toe", "exists")]
)
def test_a_name_that_cannot_be_a_package_is_refused(
    ludic: Ludic, tmp_path: Path, name: str, word: str
) -> None:
    done = ludic("init", name)
    assert done.code == 2
    assert word in done.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_written_over(ludic: Ludic, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    done = ludic("init", "mine")
    assert done.code == 2
    assert "exists already" in done.err
    assert list((tmp_path / "mine").iterdir()) == []
