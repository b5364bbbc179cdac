"""The tree of errors: one root, and messages that say what to do."""

from __future__ import annotations

import ast
import inspect
import tomllib
from pathlib import Path

import pytest

from ludic import errors
from ludic.errors import DeadlineError, LudicError, MissingExtraError, UnknownNameError
from ludic.training.metrics.loggers import TrackioLogger, WandbLogger

ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_error_has_the_one_root_and_a_docstring(cls: type[Exception]) -> None:
    assert issubclass(cls, LudicError)
    assert inspect.getdoc(cls)


def test_an_unknown_name_lists_the_nearest_or_else_all() -> None:
    near = UnknownNameError("colour", "gren", ["blue", "green"])
    assert str(near) == "unknown colour 'gren'; did you mean 'green'?"
    assert near.near == ["green"]
    far = UnknownNameError("colour", "xyz", ["red", "green"])
    assert str(far) == "unknown colour 'xyz'; known: ['green', 'red']"
    assert isinstance(far, KeyError)


def test_a_deadline_says_what_on_whom_and_for_how_long() -> None:
    error = DeadlineError("a batch", "the rollout engine", 2.5)
    assert str(error) == "waited 2.5 s for a batch from the rollout engine; the deadline passed"
    assert isinstance(error, TimeoutError)


def test_every_extra_that_an_error_names_can_be_installed(repo_root: Path) -> None:
    with (repo_root / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    named: set[str] = set()
    for path in (repo_root / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # `load_package` raises it with the extra that its callers name.
            names_it = ("MissingExtraError", "load_package")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names_it:
                _, extra = node.args
                if path.parent.name == "adapters" and ast.unparse(extra) == "extra":
                    continue
                if path.name == "loggers.py" and ast.unparse(extra) == "self.package":
                    named |= {WandbLogger.package, TrackioLogger.package}
                    continue
                assert isinstance(extra, ast.Constant), f"{path}:{node.lineno}"
                named.add(str(extra.value))
    assert named
    assert named <= set(extras)


def test_a_missing_extra_is_one_sentence_with_the_command() -> None:
    error = MissingExtraError("redis", "redis")
    assert "pip install -e '.[redis]'" in str(error)
    assert isinstance(error, ImportError)
