from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ludic
from ludic.plumbing.lazy import resolve
from ludic.registry import ALGORITHMS


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("ludic.envs.gsm8k:GSM8KEnv", "ludic.envs:GSM8KEnv"),
        ("ludic.envs.math:MATHEnv", "ludic.envs:MATHEnv"),
        ("ludic.envs.datasets.gsm8k:GSM8KEnv", "ludic.envs:GSM8KEnv"),
        ("ludic.envs.datasets.math:MATHEnv", "ludic.envs:MATHEnv"),
        ("ludic.envs.tic_tac_toe_teacher:random_legal", "ludic.envs.tic_tac_toe:random_legal"),
        ("ludic.envs.tic_tac_toe.teacher:random_legal", "ludic.envs.tic_tac_toe:random_legal"),
        ("ludic.envs.tic_tac_toe.env:TicTacToeEnv", "ludic.envs.tic_tac_toe:TicTacToeEnv"),
    ],
)
def test_places_in_run_folders_from_before_the_moves_still_resolve(earlier: str, now: str) -> None:
    assert resolve(earlier) is resolve(now)


def test_an_attribute_may_be_dotted() -> None:
    assert resolve("ludic.types:Rollout.turns").__name__ == "turns"


@pytest.mark.parametrize("name", [name for name in ALGORITHMS.names() if name != "sft"])
def test_every_preset_is_a_name_of_the_package(name: str) -> None:
    assert getattr(ludic, name) is ALGORITHMS.get(name)


@pytest.mark.parametrize("stub", sorted(Path(ludic.__path__[0]).rglob("__init__.pyi")))
def test_type_checkers_see_every_name_of_a_stub(stub: Path) -> None:
    body = ast.parse(stub.read_text(encoding="utf-8")).body
    names = [alias for line in body if isinstance(line, ast.ImportFrom) for alias in line.names]
    renamed = [ast.unparse(line.value) for line in body if isinstance(line, ast.Assign)]
    # By another name after `as`, or without one, a checker takes an import for the stub's own.
    assert [a.name for a in names if a.asname is None] == renamed
    assert all(a.asname in (None, a.name) for a in names)


def test_a_package_lists_its_late_names() -> None:
    assert {"train", "Rollout", "grpo"} < set(dir(ludic))
    assert "make_grpo" not in dir(ludic)
