"""When an output counts as right."""

from __future__ import annotations

from typing import Any

import pytest

from ludic.envs.code_exec import SandboxPool, make_verifier
from ludic.envs.code_exec.judge import Judge, Outcome
from ludic.envs.code_exec.sandbox.base import Limits
from ludic.envs.code_exec.tasks import IOCase, StdioTask
from ludic.errors import ConfigError, EnvError, UnknownNameError

NO_POOL: Any = None


@pytest.mark.parametrize(
    ("verifier", "expected", "output", "right"),
    [
        ("exact", "1 2\n", b"1 2\n", True),
        ("exact", "1 2\n", b"1 2", False),
        ("exact", "é", "é".encode(), True),
        ("whitespace", "1 2\n3\n", b"1  2 \r\n 3\n\n\n", True),
        ("whitespace", "1 2\n3\n", b"1 2 3\n", False),
        ("whitespace", "", b"\n \n", True),
        ("whitespace", "a", b"a\xff", False),
        ("whitespace", "1.0", b"1.00", False),
        ("float", "1.0 x\n", b"1.0000001 x", True),
        ("float", "1.0", b"1.1", False),
        ("float", "0", b"1e-10", True),
        ("float", "nan inf", b"NaN inf", True),
        ("float", "1.0", b"nan", False),
        ("float", "1 2", b"1", False),
        ("float", "100000000000", b"1_00000000000", False),
        ({"kind": "float", "rel": 0.1}, "10", b"10.5", True),
        ({"kind": "float", "rel": 0.01}, "10", b"10.5", False),
        ("float", "1", b"9" * 10_000, False),
    ],
)
def test_an_output_is_right_or_wrong(
    verifier: Any, expected: str, output: bytes, right: bool
) -> None:
    assert make_verifier(verifier)(NO_POOL, "", expected, output) is right


def test_unknown_verifiers_and_arguments_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="whitespace"):
        make_verifier("whitespaces")
    with pytest.raises(ConfigError, match="tolerance"):
        make_verifier({"kind": "float", "tolerance": 1})


CHECKER = """
n, a, b = int(open("input.txt").read()), *map(int, open("output.txt").read().split())
raise SystemExit(0 if a + b == n and a > 0 and b > 0 else 1)
"""


@pytest.mark.integration
@pytest.mark.sandbox
def test_a_checker_program_judges_tasks_with_several_answers(bubblewrap: SandboxPool) -> None:
    task = StdioTask("Two positive numbers with the sum n.", (IOCase("7", "any"),), CHECKER)
    judge = Judge(bubblewrap, make_verifier("exact"), Limits(), "bubblewrap")
    assert judge(task, "n = int(input())\nprint(1, n - 1)").outcome is Outcome.PASSED
    assert judge(task, "n = int(input())\nprint(0, n)").outcome is Outcome.FAILED
    assert judge(task, "print('no numbers')").outcome is Outcome.FAILED
    reads = "import ast\nast.literal_eval(open('output.txt').read())"
    literal = StdioTask("", task.cases, reads)
    assert judge(literal, "print('[1]')").outcome is Outcome.PASSED
    assert judge(literal, "print('no literal')").outcome is Outcome.FAILED
    broken = StdioTask("", task.cases, "def f(:")
    with pytest.raises(EnvError, match="does not compile"):
        judge(broken, "print(1)")
