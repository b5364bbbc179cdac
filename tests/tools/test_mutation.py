from __future__ import annotations

import ast

import pytest

from tools import mutation

SOURCE = '''
def f(a, b=2):
    """A docstring with 3 numbers."""
    if a < b and not done:
        raise ValueError(f"{a + 1}")
    return a + b
'''


def test_each_fault_changes_one_place_and_messages_are_left_alone() -> None:
    counter = mutation.Mutator()
    counter.visit(ast.parse(SOURCE))
    plain = ast.unparse(ast.parse(SOURCE))
    changed = [
        ast.unparse(ast.fix_missing_locations(mutation.Mutator(n).visit(ast.parse(SOURCE))))
        for n in range(len(counter.found))
    ]
    assert len(set(changed)) == len(changed)
    assert plain not in changed
    assert all("raise ValueError(f'{a + 1}')" in text and "3 numbers" in text for text in changed)
    for expected in ("a <= b", "a < b or", "and done", "a - b", "b=3"):
        assert any(expected in text for text in changed)


def test_every_target_and_its_tests_are_there() -> None:
    for path, tests in mutation.TARGETS.items():
        assert (mutation.SOURCE / path).is_file()
        assert all((mutation.ROOT / test).exists() for test in tests)
        assert mutation.faults(path)


def test_equivalent_faults_are_named_with_a_line_that_is_there() -> None:
    for path, line in mutation.EQUIVALENT:
        text = (mutation.SOURCE / path).read_text(encoding="utf-8")
        assert line in {" ".join(found.split()) for found in text.splitlines()}


def test_a_sample_is_drawn_evenly_and_repeats() -> None:
    first = mutation.chosen_faults(["saw"], 20, 3)
    assert len(first) == 20
    assert first == mutation.chosen_faults(["saw"], 20, 3)
    assert first != mutation.chosen_faults(["saw"], 20, 4)


@pytest.mark.slow
def test_a_fault_in_the_core_is_noticed() -> None:
    fault = mutation.faults("saw/grouping.py")[0]
    assert mutation.is_noticed(fault, ("tests/saw/test_assembly.py",), 300)
