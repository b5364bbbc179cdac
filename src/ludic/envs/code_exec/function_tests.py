"""Asserts that never meet the code that they test: two sandboxes, and the host between them.

The solution runs in one sandbox (`serve_solution`) and sees only the arguments of the calls. The
task's asserts, with the expected values in them, run in the other (`run_tests`). A call and its
answer pass through the host as the bytes that they are: only the tests' sandbox reads what a
solution returned. What the host reads itself are single letters and single strings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.sandbox.base import (
    Limits,
    RunResult,
    RunStatus,
    SandboxError,
    text_of_line,
)
from ludic.envs.code_exec.sandbox.pool import SandboxPool
from ludic.envs.code_exec.sandbox.worker import Program, Sandbox

_FOLDER = Path(__file__).parent
_SLACK_S = 10.0
_TRAFFIC_KB = 16 * 1024
_MAX_MESSAGE = 4 << 20
_MAX_TEXT = 16 << 10


@dataclass(frozen=True, slots=True)
class FunctionResults:
    """One entry of `errors` per test that was run: None where it passed.

    `failed` says why the solution could not even be loaded; `compiles` whether it is Python.
    `ended` is how the solution's process ended where it did not last until the tests were over;
    `late` is whether somebody ran out of time, for which a busy machine may be to blame.
    """

    errors: tuple[str | None, ...]
    failed: str | None = None
    compiles: bool = True
    ended: RunStatus | None = None
    late: bool = False


def run_function_tests(
    pool: SandboxPool,
    solution: bytes,
    *,
    entry_point: str,
    tests: Sequence[str],
    setup: str = "",
    limits: Limits | None = None,
    stop_at_failure: bool = True,
    alone: bool = False,
) -> FunctionResults:
    """Loads `solution`, and runs `tests`, each code with asserts, that call its `entry_point` by
    that name or as `candidate`. `setup` (a prompt with helpers) is run first on both sides."""
    limits = limits or Limits()
    job: dict[str, Any] = {"entry_point": entry_point, "setup": setup}
    job |= {"tests": list(tests), "stop_at_failure": stop_at_failure}
    return pool.attempt(
        lambda boxes: _run(boxes, solution, job, limits), ("program", "judge"), alone=alone
    )


def _run(
    boxes: Sequence[Sandbox], solution: bytes, job: dict[str, Any], limits: Limits
) -> FunctionResults:
    visible = {name: job[name] for name in ("entry_point", "setup")}  # never the tests
    solver = boxes[0].open(
        {
            **_package("serve_solution"),
            "solution.py": solution,
            "job.json": json.dumps(visible).encode(),
        },
        ["python", "main.py"],
        replace(limits, output_kb=max(limits.output_kb, _TRAFFIC_KB)),
    )
    deadline = time.monotonic() + limits.wall_s + _SLACK_S
    programs = [solver]
    try:
        line, result = _line(solver, deadline, _MAX_TEXT)
        report = None if line is None else text_of_line(line)
        if report != "ready":
            return _not_loaded(report, result or solver.kill(), deadline)
        tester = boxes[1].open(
            {**_package("serve_solution", "run_tests"), "job.json": json.dumps(job).encode()},
            ["python", "main.py"],
            Limits(wall_s=limits.wall_s + _SLACK_S, cpu_s=limits.wall_s, output_kb=_TRAFFIC_KB),
        )
        programs.append(tester)
        return _relay(solver, tester, len(job["tests"]), deadline)
    finally:
        for program in programs:
            with suppress(SandboxError):  # a broken sandbox is noticed when it is used next
                program.kill()


def _relay(solver: Program, tester: Program, tests: int, deadline: float) -> FunctionResults:
    errors: list[str | None] = []
    ended: RunStatus | None = None
    late, gone = False, b""
    while True:
        line, result = _line(tester, deadline, _MAX_MESSAGE)
        if line is None or line[:1] not in b"CPF." or not line.endswith(b"\n"):
            result = result or tester.kill()
            errors.append(f"the tests ended with {result.status}")
            late = late or result.late or time.monotonic() >= deadline
            return FunctionResults(tuple(errors[:tests]), ended=ended, late=late)
        kind, content = line[:1], line[1:]
        if kind == b".":
            return FunctionResults(tuple(errors[:tests]), ended=ended, late=late)
        if kind in b"PF":
            errors.append(None if kind == b"P" else text_of_line(content[:_MAX_TEXT]) or "")
            continue
        answer: bytes | None = gone or None
        if answer is None:
            solver.send(content)
            answer, result = _line(solver, deadline, _MAX_MESSAGE)
            if answer is None or not answer.endswith(b"\n"):
                result = result or solver.kill()
                late = result.late or time.monotonic() >= deadline
                ended, why = result.status, f"the solution was ended: {_why(result)}"
                answer = gone = json.dumps({"error": ["", why]}).encode() + b"\n"
        tester.send(answer)


def _line(
    program: Program, deadline: float, max_bytes: int
) -> tuple[bytes | None, RunResult | None]:
    """The next line; or None, and how the program ended if it has."""
    try:
        line = program.receive_line(max(0.0, deadline - time.monotonic()), max_bytes)
    except TimeoutError:
        return None, None
    return line, program.finish() if line is None else None


def _not_loaded(report: str | None, result: RunResult, deadline: float) -> FunctionResults:
    if report is None:
        late = result.late or time.monotonic() >= deadline
        return FunctionResults((), failed=_why(result), ended=result.status, late=late)
    kind, _, why = report.partition(" ")
    return FunctionResults((), failed=why[:1000], compiles=kind != "no_python")


def _why(result: RunResult) -> str:
    if result.status in (RunStatus.OK, RunStatus.ERROR):
        return f"exit status {result.exit_code}"
    return str(result.status)


@cache
def _package(*names: str) -> dict[str, bytes]:
    """Modules of this package for a sandbox, in packages that hold nothing else, and a program that
    runs the last of them."""
    folders = __package__.split(".")
    files = {"/".join([*folders[:n], "__init__.py"]): b"" for n in range(1, len(folders) + 1)}
    for name in names:
        files["/".join([*folders, f"{name}.py"])] = (_FOLDER / f"{name}.py").read_bytes()
    main = f"from {__package__}.{names[-1]} import main\nmain()\n"
    return {**files, "main.py": main.encode()}
