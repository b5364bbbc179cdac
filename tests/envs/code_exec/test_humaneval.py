"""HumanEval: every canonical solution passes, and none does with its body replaced by `pass`.

The data is looked for in LUDIC_HUMANEVAL, or beside the checkout.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ludic.envs.code_exec import Judge, Limits, Outcome, SandboxPool, Verdict, make_verifier
from ludic.envs.code_exec.tasks import humaneval_task

pytestmark = [pytest.mark.integration, pytest.mark.sandbox, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    beside = ROOT.parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl"
    path = Path(os.environ.get("LUDIC_HUMANEVAL", beside))
    if not path.exists():
        pytest.skip("HumanEval is not here: let LUDIC_HUMANEVAL name its JSONL file")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def verdicts(pool: SandboxPool, rows: list[dict[str, Any]], answers: list[str]) -> list[Verdict]:
    judge = Judge(pool, make_verifier("exact"), Limits(wall_s=30, cpu_s=30), "bubblewrap")
    with ThreadPoolExecutor(pool.workers) as threads:
        return list(threads.map(judge, map(humaneval_task, rows), answers))


def test_all_164_canonical_solutions_pass(
    bubblewrap: SandboxPool, rows: list[dict[str, Any]]
) -> None:
    assert len(rows) == 164
    answers = [f"```python\n{row['prompt']}{row['canonical_solution']}\n```" for row in rows]
    found = verdicts(bubblewrap, rows, answers)
    assert [
        (row["task_id"], verdict)
        for row, verdict in zip(rows, found, strict=True)
        if verdict.outcome is not Outcome.PASSED
    ] == []


def test_none_of_them_passes_without_its_body(
    bubblewrap: SandboxPool, rows: list[dict[str, Any]]
) -> None:
    found = verdicts(bubblewrap, rows, ["    pass\n"] * len(rows))
    assert [
        row["task_id"] for row, verdict in zip(rows, found, strict=True) if verdict.passed
    ] == []
    assert all(verdict.compiles for verdict in found)


def test_a_body_alone_completes_the_prompt(
    bubblewrap: SandboxPool, rows: list[dict[str, Any]]
) -> None:
    some = rows[::20]
    found = verdicts(bubblewrap, some, [row["canonical_solution"] for row in some])
    assert all(verdict.outcome is Outcome.PASSED for verdict in found)
