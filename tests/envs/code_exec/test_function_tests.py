"""A solution and its asserts in two sandboxes: what crosses, and what does not."""

from __future__ import annotations

import json
import math
from collections import Counter, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.envs.code_exec.function_tests import FunctionResults, run_function_tests
from ludic.envs.code_exec.sandbox.base import Limits, RunStatus
from ludic.envs.code_exec.sandbox.pool import SandboxPool
from ludic.envs.code_exec.serve_solution import CannotCross, decode, encode
from tests.envs.code_exec.cheats import CHEATS

Point = namedtuple("Point", "x y")

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False) | st.fractions(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)


def crossed(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b) if isinstance(a, float) else a == b


@given(values)
def test_plain_values_cross_unchanged(value: Any) -> None:
    there = crossed(value)
    assert there == value
    assert type(there) is type(value)


@pytest.mark.parametrize(
    "value",
    [math.inf, -math.inf, -0.0, 10**5000, -(2**63), range(1, 9, 2), bytearray(b"\x00\xff"),
     Decimal("1.10"), Fraction(1, 3), ..., {(1, 2): {frozenset({1})}}, True, 1, "\ud800"],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_odd_values_cross_unchanged(value: Any) -> None:
    there = crossed(value)
    assert same(there, value)
    assert type(there) is type(value)
    assert math.isnan(crossed(math.nan))


def test_subclasses_cross_as_what_they_are_made_of_and_objects_not_at_all() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert type(crossed(Sly(3))) is int
    assert crossed(Counter("aab")) == {"a": 2, "b": 1}
    assert crossed(Point(1, 2)) == (1, 2)
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), loop, lambda: 1, iter([])):
        with pytest.raises(CannotCross):
            encode(value)


def tried(pool: SandboxPool, solution: str, *tests: str, **options: Any) -> FunctionResults:
    return run_function_tests(
        pool, solution.encode(), entry_point="f", tests=tests, stop_at_failure=False, **options
    )


pytestmark = [pytest.mark.integration]


@pytest.mark.sandbox
def test_asserts_pass_and_fail_one_by_one(bubblewrap: SandboxPool) -> None:
    found = tried(
        bubblewrap,
        "def f(x, *, k=1): return {'a': (x, {x * k})}",
        "assert f(2, k=3) == {'a': (2, {6})}",
        "assert candidate(2) == 5",
        "assert f(1)['a'][0] == 1",
    )
    assert found.errors == (None, "AssertionError", None)


@pytest.mark.sandbox
def test_helpers_changes_in_place_and_exceptions_are_there_on_both_sides(
    bubblewrap: SandboxPool,
) -> None:
    setup = "import math\n\ndef helper(x):\n    return x + 1\n\ndef f(x):\n    '''stub'''\n"
    found = tried(
        bubblewrap,
        "def f(xs):\n    if not xs: raise KeyError()\n    xs.append(helper(math.floor(1.5)))",
        "xs = [1]\nassert f(xs) is None\nassert xs == [1, helper(1)]",
        "try:\n    f([])\nexcept KeyError:\n    pass\nelse:\n    assert False",
        setup=setup,
    )
    assert found.errors == (None, None)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("solution", "compiles", "said"),
    [
        ("def f(:", False, "SyntaxError"),
        ("def g(): pass", True, "no function 'f'"),
        ("1 / 0\ndef f(): pass", True, "ZeroDivisionError"),
        ("raise SystemExit(0)", True, "SystemExit"),
        ("import os; os._exit(0)", True, "exit status 0"),
        ("while True: pass", True, "time"),
    ],
)
def test_a_solution_that_cannot_be_loaded_is_said_to_be(
    bubblewrap: SandboxPool, solution: str, compiles: bool, said: str
) -> None:
    found = tried(bubblewrap, solution, "assert f() is None", limits=Limits(wall_s=2, cpu_s=2))
    assert found.failed is not None
    assert said in found.failed
    assert found.compiles is compiles


@pytest.mark.sandbox
@pytest.mark.parametrize("name", CHEATS)
def test_no_solution_passes_without_the_answer(bubblewrap: SandboxPool, name: str) -> None:
    found = tried(bubblewrap, CHEATS[name], "assert f(1) == 42", "assert len([f(2)]) == 42")
    assert found.failed is not None or (found.errors and None not in found.errors)


@pytest.mark.sandbox
def test_a_solution_that_hangs_or_dies_fails_the_rest_and_says_how(bubblewrap: SandboxPool) -> None:
    tests = ("assert f(0) == 0", "assert f(1) == 1", "assert f(0) == 0")
    hangs = "def f(x):\n    while x: pass\n    return x"
    found = tried(bubblewrap, hangs, *tests, limits=Limits(wall_s=2, cpu_s=10))
    assert found.ended is RunStatus.WALL_TIME
    assert found.errors[0] is None
    assert None not in found.errors[1:]
    dies = "import os\ndef f(x):\n    if x: os.abort()\n    return x"
    found = tried(bubblewrap, dies, *tests)
    assert found.ended is RunStatus.SIGNAL
    assert [error is None for error in found.errors] == [True, False, False]
