from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tools import mutation
from tools.mutation_targets import TARGETS, UNSEEN

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
    changed = [mutation.mutated(SOURCE, n) for n in range(len(counter.found))]
    assert len(set(changed)) == len(changed)
    assert plain not in changed
    assert all("raise ValueError(f'{a + 1}')" in text and "3 numbers" in text for text in changed)
    for expected in ("a <= b", "a < b or", "and done", "a - b", "b=3"):
        assert any(expected in text for text in changed)


def test_every_target_and_its_tests_are_there() -> None:
    for path, tests in TARGETS.items():
        assert (mutation.SOURCE / path).is_file()
        assert all((mutation.ROOT / test).exists() for test in tests)
        assert mutation.faults(path)


def test_faults_that_no_test_sees_are_there_and_have_a_reason() -> None:
    for (path, line, what), reason in UNSEEN.items():
        found = {(f.text, f.what) for f in mutation.faults(path)}
        assert (line, what) in found
        assert reason


def test_a_sample_is_spread_over_the_targets_and_repeats() -> None:
    first = mutation.chosen_faults(["saw", "credit"], 60, 3)
    each = Counter(fault.path for fault in first)
    whole = {path: len(mutation.faults(path)) for path in each}
    assert len(first) == len(set(first)) == 60
    assert len(each) == sum("saw" in p or "credit" in p for p in TARGETS)
    least = min(n for path, n in each.items() if n < whole[path])
    assert max(each.values()) - least <= 1
    assert first == mutation.chosen_faults(["saw", "credit"], 60, 3)
    assert first != mutation.chosen_faults(["saw", "credit"], 60, 4)


def test_without_a_sample_every_fault_is_tried() -> None:
    assert mutation.chosen_faults(["saw/filters"], None, 0) == mutation.faults("saw/filters.py")


@pytest.mark.slow
def test_a_fault_is_noticed_by_tests_that_pass_without_it(tmp_path: Path) -> None:
    trial = mutation.Trial(mutation.copy_of_project(tmp_path), 300)
    fault = mutation.faults("saw/grouping.py")[0]
    assert trial.verdict(fault, ("tests/test_seeding.py",)) == "missed"
    tests = ("tests/test_seeding.py", "tests/saw/test_assembly.py")
    assert trial.verdict(fault, tests) == "noticed"
    broken = trial.copy / "tests/test_seeding.py"
    broken.write_text(
        broken.read_text() + "\n\ndef test_nothing() -> None:\n    raise ValueError\n"
    )
    with pytest.raises(RuntimeError, match="fails without any fault"):
        mutation.Trial(trial.copy, 300).verdict(fault, tests)
