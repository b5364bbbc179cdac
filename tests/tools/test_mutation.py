from __future__ import annotations

import ast
import json
import subprocess
import sys
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
    assert set(mutation.chosen_faults(["saw/filters"], None, 0)) == set(
        mutation.faults("saw/filters.py")
    )


def outcome(*command: str) -> list[str]:
    """What Python prints. It has to be another one: this one has imported Ludic without a fault."""
    ended = subprocess.run(
        [sys.executable, *command], cwd=mutation.ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


VERDICTS = """
import sys
from pathlib import Path
from tools import mutation
folder, added = Path(sys.argv[1]), sys.argv[2]
trial = mutation.Trial(mutation.copy_of_project(folder), folder, timeout_s=100)
file = trial.copy / "tests/test_seeding.py"
file.write_text(f"{file.read_text()}\\n\\n{added}\\n")
fault = mutation.faults("saw/filters.py")[0]
for tests in (["tests/test_seeding.py"], ["tests/test_seeding.py", "tests/saw/test_filters.py"]):
    print("", trial.verdict(fault, tests), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("", "missed"),
        ("def test_nothing() -> None:\n    raise ValueError", "baseline fails"),
        ("import no_such_module", "baseline fails"),
        ("import os\nos._exit(3)", "baseline fails"),
    ],
)
def test_tests_that_fail_without_a_fault_are_left_out(
    tmp_path: Path, added: str, expected: str
) -> None:
    assert outcome("-c", VERDICTS, str(tmp_path), added) == ["", expected, "", "noticed"]


@pytest.mark.slow
def test_jobs_share_a_sample_and_say_what_the_limit_cut() -> None:
    command = ("-m", "tools.mutation", "saw/filters", "--sample", "3", "--jobs", "2")
    *lines, summary = outcome(*command)
    figures = json.loads(summary)
    assert (figures["faults"], figures["cut"], figures["failing"]) == (3, 0, [])
    assert sum("saw/filters.py:" in line for line in lines) == 3
    assert json.loads(outcome(*command, "--limit-s", "0")[-1])["cut"] == 3
