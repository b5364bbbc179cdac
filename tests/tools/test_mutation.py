from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools import mutation, mutation_faults
from tools.mutation_targets import TARGETS
from tools.mutation_unseen import UNSEEN

SOURCE = '''
def f(a, b=2):
    """A docstring with 3 numbers."""
    if a < b and not done:
        raise ValueError(f"{a + 1}")
    return a + b
'''


def test_each_fault_changes_one_place_and_messages_are_left_alone() -> None:
    counter = mutation_faults.Mutator()
    counter.visit(ast.parse(SOURCE))
    plain = ast.unparse(ast.parse(SOURCE))
    changed = [mutation_faults.mutated(SOURCE, n) for n in range(len(counter.found))]
    assert len(set(changed)) == len(changed)
    assert plain not in changed
    assert all("raise ValueError(f'{a + 1}')" in text and "3 numbers" in text for text in changed)
    for expected in ("a <= b", "a < b or", "and done", "a - b", "b=3"):
        assert any(expected in text for text in changed)


def test_every_target_and_its_tests_are_there() -> None:
    for path, tests in TARGETS.items():
        assert (mutation_faults.SOURCE / path).is_file()
        assert all((mutation_faults.ROOT / test).exists() for test in tests)
        assert mutation_faults.faults(path)


def test_a_fault_is_judged_by_every_test_file_that_is_named_for_its_module_or_imports_it() -> None:
    named, others = mutation.tests_of("training/update/recovery.py")
    assert named[1] == "tests/training/update/test_recovery.py"
    assert "tests/training/update/test_packing.py" in others  # in a folder that is named
    assert not set(named) & set(others)
    _, others = mutation.tests_of("sharding/weights.py")
    assert "tests/distributed/test_publish_stages.py" in others  # imports it by its name
    _, others = mutation.tests_of("training/update/policy.py")
    assert "tests/memory/test_update.py" in others


def test_faults_that_no_test_sees_are_there_and_have_a_reason() -> None:
    for (path, line, what), reason in UNSEEN.items():
        found = {(f.text, f.what) for f in mutation_faults.faults(path)}
        assert (line, what) in found
        assert reason


def test_a_sample_is_spread_over_the_targets_and_repeats() -> None:
    first = mutation.chosen_faults(["saw", "credit"], 60, 3)
    each = Counter(fault.path for fault in first)
    whole = {path: len(mutation_faults.faults(path)) for path in each}
    assert len(first) == len(set(first)) == 60
    assert len(each) == sum("saw" in p or "credit" in p for p in TARGETS)
    least = min(n for path, n in each.items() if n < whole[path])
    assert max(each.values()) - least <= 1
    assert first == mutation.chosen_faults(["saw", "credit"], 60, 3)
    assert first != mutation.chosen_faults(["saw", "credit"], 60, 4)


def test_without_a_sample_every_fault_is_tried() -> None:
    assert set(mutation.chosen_faults(["saw/filters"], None, 0)) == set(
        mutation_faults.faults("saw/filters.py")
    )


def outcome(*command: str) -> list[str]:
    """What Python prints. It has to be another one: this one has imported Ludic without a fault."""
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=mutation_faults.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


VERDICTS = """
import sys
from pathlib import Path
from tools import mutation, mutation_faults
folder, added = Path(sys.argv[1]), sys.argv[2]
trial = mutation.Trial(mutation.copy_of_project(folder), folder, timeout_s=100)
file = trial.copy / "tests/test_seeding.py"
file.write_text(f"{file.read_text()}\\n\\n{added}\\n")
fault = mutation.faults("saw/filters.py")[0]
for others in ([], ["tests/saw/test_filters.py"]):
    verdict, left_out = trial.verdict(fault, ["tests/test_seeding.py"], others)
    print("", verdict, *left_out, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("added", "left_out"),
    [
        ("", []),
        ("def test_no() -> None:\n    raise ValueError", ["tests/test_seeding.py::test_no"]),
        ("import no_such_module", ["tests/test_seeding.py"]),
        ("import os\nos._exit(3)", ["tests/test_seeding.py"]),
    ],
)
def test_tests_that_fail_without_a_fault_are_left_out_and_the_others_judge(
    tmp_path: Path, added: str, left_out: list[str]
) -> None:
    alone = ["", "baseline fails" if left_out else "missed", *left_out]
    assert outcome("-c", VERDICTS, str(tmp_path), added) == [*alone, "", "noticed", *left_out]


@pytest.mark.slow
def test_jobs_share_a_sample_and_say_what_the_limit_cut() -> None:
    command = ("-m", "tools.mutation", "saw/filters", "--sample", "3", "--jobs", "2")
    *lines, summary = outcome(*command)
    figures = json.loads(summary)
    assert (figures["faults"], figures["cut"], figures["failing"]) == (3, 0, [])
    assert sum("saw/filters.py:" in line for line in lines) == 3
    assert json.loads(outcome(*command, "--limit-s", "0")[-1])["cut"] == 3
