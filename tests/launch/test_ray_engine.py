"""What the Ray engine refuses, in one sentence each; no cluster is needed for that."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludic.errors import LaunchError
from ludic.launch import Role

pytestmark = pytest.mark.cluster


@pytest.fixture
def engine() -> Any:
    from ludic.launch import ray_engine

    return ray_engine


@pytest.fixture
def expected(engine: Any, tmp_path: Path) -> Any:
    (tmp_path / "mark").write_text("word")
    return engine.Expected(sys.executable, tmp_path, tmp_path / "mark", "word")


def test_a_node_that_has_everything_is_good(engine: Any, expected: Any) -> None:
    assert engine._wrong_with(expected) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"versions": ("3.9.1", "0.1")}, "has Python .*, and the driver has 3.9.1: install the"),
        ({"python": "/nowhere/python"}, "cannot run /nowhere/python .cluster.python.: "),
        ({"python": "/bin/false"}, "cannot import Ludic with /bin/false"),
        ({"folder": Path("/nowhere")}, "has no folder /nowhere: set cluster.folder"),
        ({"mark": Path("/nowhere/mark")}, "does not see the run folder /nowhere: keep runs"),
        ({"word": "another"}, "does not see the run folder"),
    ],
)
def test_what_a_node_lacks_is_one_sentence(
    engine: Any, expected: Any, changes: dict[str, Any], sentence: str
) -> None:
    wrong = engine._wrong_with(replace(expected, **changes))
    with pytest.raises(LaunchError, match=sentence):
        raise LaunchError(wrong)


def test_another_ludic_on_a_node_is_refused(engine: Any, expected: Any) -> None:
    python, _ = expected.versions
    wrong = engine._wrong_with(replace(expected, versions=(python, "99.0")))
    assert "has Ludic" in wrong
    assert "the driver has 99.0" in wrong


def roles(**trainer: Any) -> list[Role]:
    log = Path("unused.log")
    servers = [Role(f"server-{n}", (), log, kind="server", gpus=1.0) for n in range(8)]
    return [Role("trainer", (), log, kind="trainer", **trainer), *servers]


def test_too_few_gpus_are_said_with_who_asked_for_them(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = {"Resources": {"CPU": 64.0, "GPU": 8.0}}
    monkeypatch.setattr(engine, "_nodes", lambda: [node])
    made = engine.RayEngine.__new__(engine.RayEngine)
    why = made.shortage(roles(gpus=8.0))
    assert why == "asked for 16 GPUs (8 trainer, 8 server), the cluster has 8"
    monkeypatch.setattr(engine, "_nodes", lambda: [node, node])
    assert made.shortage(roles(gpus=8.0)) is None
    why = made.shortage(roles(gpus=4.0, nodes=3, cpus=4.0))
    assert why == "asked for 20 GPUs (12 trainer, 8 server), the cluster has 16"
    why = made.shortage(roles(gpus=2.0, nodes=3, cpus=4.0))
    assert why == ("trainer asked for 3 nodes with 4 CPUs and 2 GPUs each; 2 of 2 nodes have that")


def test_no_cluster_is_one_sentence(
    engine: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nMore words.")

    monkeypatch.setattr(engine.ray, "init", refuse)
    with pytest.raises(LaunchError, match=r"there is no Ray cluster here: .*ray start --head"):
        engine.RayEngine(expected)
