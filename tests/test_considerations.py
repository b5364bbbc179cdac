"""Every rule of CONSIDERATIONS.md is held by a test, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def named_tests(root: Path) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", (root / "CONSIDERATIONS.md").read_text()))


def defined_tests(root: Path) -> set[str]:
    names: set[str] = set()
    for path in (root / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
    return names


def test_every_test_that_the_considerations_name_exists(repo_root: Path) -> None:
    named = named_tests(repo_root)
    assert len(named) > 40
    assert named - defined_tests(repo_root) == set()


def test_every_rule_of_the_considerations_names_its_test(repo_root: Path) -> None:
    text = (repo_root / "CONSIDERATIONS.md").read_text()
    rules = re.findall(r"^- .*(?:\n {2}.*)*", text, flags=re.MULTILINE)
    assert rules
    without = [rule for rule in rules if "`test_" not in rule and "(see below)" not in rule]
    assert without == []
