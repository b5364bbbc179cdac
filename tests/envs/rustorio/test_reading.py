"""What is read without a compiler: programs that are refused, and what a compiler said."""

from __future__ import annotations

import json

import pytest

from ludic.envs.rustorio.crate import errors_in
from ludic.envs.rustorio.env import refusal

MACROS = "macro_rules! m { ($l:lifetime) => {} }"


@pytest.mark.parametrize(
    "program",
    [
        "let c = 'a'; match c { 'b' => '\\'', '\\\\' => '\"', '\\u{1F600}' => b'\\x41' };",
        "'outer: loop { 'in_1 : loop { break 'outer; } continue 'in_1; }",
        "break 'a';",
        "// it's\n/// dyn 'a\n/* don't, \" dyn */ let s = \"it's dyn \\\" 'a\";",
        'let s = r"it\'s \\"; let t = br##"dyn "# \'a"##; let u = c"dyn";',
        "let dynamic = anodyne; #![allow(unused)]",
        MACROS,
        "",
    ],
)
def test_what_only_looks_like_a_lifetime_is_compiled(program: str) -> None:
    assert refusal(program) is None


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("fn f<'a>() {}", "Line 1 has a lifetime"),
        ("fn f() {}\nfn g(x: &'static u8) {}", "Line 2 has a lifetime"),
        ("impl A<'_> for B {}", "a lifetime"),
        ("fn f<'r#a>() {}", "a lifetime"),
        ("fn f<'℘>() {}", "a lifetime"),
        ("fn f<'a: 'b>() {}", "a lifetime"),
        ("fn f(x: &dyn A) {}", "`dyn`"),
        (f"{MACROS} m!('a:); m!('b:);", "a label in a program with macros"),
        (f"{MACROS} m!(break 'a);", "a label in a program with macros"),
        ('/* /* */ " */ fn f<\'a>() {} // "', "a comment inside another"),
        ('/* " */ fn f<\'a>() {} // "', "a lifetime"),
        ('#!/bin/sh "\nfn f<\'a>() {} // "', "`#!`"),
        ('let s = r#"x"; fn f<\'a>() {}', "does not end"),
        ('"\\" fn f<\'a>() {}', "does not end"),
        ('m!("a"r#"x" fn f<\'a>() {} "#);', "a lifetime"),
        ("'\\'' 'a", "a lifetime"),
    ],
)
def test_lifetimes_and_what_could_hide_them_are_refused(program: str, why: str) -> None:
    said = refusal(program)
    assert said is not None
    assert why in said


@pytest.mark.parametrize(
    ("part", "refused"),
    [('"\\', True), ('r#"', True), ("/*", True), ("'\\", True), ("'a: ", False), ("//", False)],
)
def test_the_longest_programs_are_read(part: str, refused: bool) -> None:
    """In proportion to their length: anything worse takes minutes at this size."""
    assert (refusal(part * ((256 << 10) // len(part))) is not None) == refused


def said(message: str, level: str = "error") -> str:
    return json.dumps(
        {"level": level, "message": message, "rendered": f"{message}\n"}, ensure_ascii=False
    )


def test_errors_are_read_from_whole_lines_only() -> None:
    odd = "unknown start of token: \u2028 \x85 here"
    lines = [said("first"), said("unused", "warning"), "a note", "{no JSON}", said(odd)]
    output = "\n".join([*lines, said("aborting due to 2 errors"), said("last")[:-9]])
    assert errors_in(output) == ["first", odd]
