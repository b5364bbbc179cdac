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
        ("ludic.envs.gsm8k:GSM8KEnv", "ludic.envs.datasets.gsm8k:GSM8KEnv"),
        ("ludic.envs.math:MATHEnv", "ludic.envs.datasets.math:MATHEnv"),
        (
            "ludic.envs.tic_tac_toe_teacher:random_legal",
            "ludic.envs.tic_tac_toe.teacher:random_legal",
        ),
    ],
)
def test_places_in_run_folders_from_before_the_moves_still_resolve(earlier: str, now: str) -> None:
    assert resolve(earlier) is resolve(now)


def test_an_attribute_may_be_dotted() -> None:
    assert resolve("ludic.types:Rollout.turns").__name__ == "turns"


@pytest.mark.parametrize("name", [name for name in ALGORITHMS.names() if name != "sft"])
def test_every_preset_is_a_name_of_the_package(name: str) -> None:
    assert getattr(ludic, name) is ALGORITHMS.get(name)


def test_the_stub_of_the_package_exports_what_it_imports(repo_root: Path) -> None:
    stub = ast.parse((repo_root / "src/ludic/__init__.pyi").read_text(encoding="utf-8"))
    (exported,) = [
        ast.literal_eval(line.value) for line in stub.body if isinstance(line, ast.Assign)
    ]
    assert exported == ludic.__all__
