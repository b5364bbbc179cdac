"""Regular expressions that every Python the package allows reads alike."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent / "src"
_POSSESSIVE_GROUP = re.compile(r"(?<!\\)\)(?:[*+?]|\{\d*,?\d*\})\+")
"""A group that is repeated and never given back: Python 3.11.0 to 3.11.4 misread it."""


def possessive_groups(source: str) -> list[str]:
    """The texts in a module that would be such a pattern."""
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _POSSESSIVE_GROUP.search(node.value)
    ]


def test_no_pattern_repeats_a_group_possessively() -> None:
    paths = sorted(SOURCES.rglob("*.py"))
    assert len(paths) > 200
    assert {str(p): bad for p in paths if (bad := possessive_groups(p.read_text()))} == {}


@pytest.mark.parametrize("pattern", ["(?:ab)*+c", "(ab)++", "(?:a|b)?+", "(a){2,3}+"])
def test_a_possessive_group_is_noticed(pattern: str) -> None:
    assert possessive_groups(f"P = {pattern!r}") == [pattern]


@pytest.mark.parametrize("pattern", ["[^<]*+(?:ab)*", r"\)*+", "(a)+ (b)+", "f(x) + 1"])
def test_other_patterns_are_not(pattern: str) -> None:
    assert possessive_groups(f"P = {pattern!r}") == []
