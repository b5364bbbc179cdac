"""The host between the two sandboxes: passes calls on, and knows how each side ended."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.sandbox import (
    Limits,
    Program,
    RunResult,
    RunStatus,
    Sandbox,
    SandboxError,
    SandboxPool,
)

_FOLDER = Path(__file__).parent
_SERVE = f"from {__package__}.serve_solution import main\nmain()\n".encode()
_TESTS = f"from {__package__}.run_tests import main\nmain()\n".encode()
_SLACK_S = 10.0
_TRAFFIC_KB = 16 * 1024


@dataclass(frozen=True, slots=True)
class FunctionResults:
    """One entry of `errors` per test that was run: None where it passed.

    `failed` says why the solution could not even be loaded; `compiles` whether it is Python.
    `ended` is how the solution's process ended where it did not last until the tests were over.
    """

    errors: tuple[str | None, ...]
    failed: str | None = None
    compiles: bool = True
    ended: RunStatus | None = None


def run_function_tests(
    pool: SandboxPool,
    solution: bytes,
    *,
    entry_point: str,
    tests: Sequence[str],
    setup: str = "",
    limits: Limits | None = None,
    stop_at_failure: bool = True,
) -> FunctionResults:
    """Loads `solution`, and runs `tests`, each code with asserts, that call its `entry_point` by
    that name or as `candidate`. `setup` (a prompt with helpers) is run first on both sides."""
    limits = limits or Limits()
    job = {
        "entry_point": entry_point,
        "setup": setup,
        "tests": list(tests),
        "stop_at_failure": stop_at_failure,
    }
    return pool.attempt(lambda boxes: _run(boxes, solution, job, limits), sandboxes=2)


def _run(
    boxes: Sequence[Sandbox], solution: bytes, job: dict[str, Any], limits: Limits
) -> FunctionResults:
    shared = _package()
    known = {name: job[name] for name in ("entry_point", "setup")}  # never the tests
    solver = boxes[0].open(
        {
            **shared,
            "main.py": _SERVE,
            "solution.py": solution,
            "job.json": json.dumps(known).encode(),
        },
        ["python", "main.py"],
        replace(limits, output_kb=max(limits.output_kb, _TRAFFIC_KB)),
    )
    deadline = time.monotonic() + limits.wall_s + _SLACK_S
    tester: Program | None = None
    try:
        told, result = _line(solver, deadline)
        if told is None or "failed" in told or not told.get("ready"):
            result = result or solver.kill()
            return _not_loaded(told, result)
        tester = boxes[1].open(
            {**shared, "main.py": _TESTS, "job.json": json.dumps(job).encode()},
            ["python", "main.py"],
            Limits(wall_s=limits.wall_s + _SLACK_S, cpu_s=limits.wall_s, output_kb=_TRAFFIC_KB),
        )
        return _relay(solver, tester, len(job["tests"]), deadline)
    finally:
        _end(solver)
        if tester is not None:
            _end(tester)


def _relay(solver: Program, tester: Program, tests: int, deadline: float) -> FunctionResults:
    ended: RunStatus | None = None
    gone = "the solution is gone"
    while True:
        request, result = _line(tester, deadline)
        if request is None:
            status = "no answer" if result is None else str(result.status)
            return FunctionResults((f"the tests ended with {status}",), ended=ended)
        if "results" in request:
            errors = tuple(
                None if entry["passed"] else str(entry.get("error", ""))
                for entry in request["results"][:tests]
            )
            return FunctionResults(errors, ended=ended)
        answer: dict[str, Any] | None = None
        if ended is None:
            solver.send(json.dumps(request).encode() + b"\n")
            answer, result = _line(solver, deadline)
            if answer is None:
                result = result or solver.kill()
                ended, gone = result.status, f"the solution was ended: {_why(result)}"
        tester.send(json.dumps(answer or {"error": ["", gone]}).encode() + b"\n")


def _line(program: Program, deadline: float) -> tuple[dict[str, Any] | None, RunResult | None]:
    """The next message; or None, and how the program ended if it has."""
    try:
        line = program.receive_line(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return None, None
    if line is None:
        return None, program.finish()
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # a solution that has found the pipe
        return None, program.kill()
    return (message, None) if isinstance(message, dict) else (None, program.kill())


def _not_loaded(told: dict[str, Any] | None, result: RunResult) -> FunctionResults:
    if told is None:
        return FunctionResults((), failed=_why(result), ended=result.status)
    why = str(told.get("failed", "it said something else"))[:1000]
    return FunctionResults((), failed=why, compiles=bool(told.get("compiles", True)))


def _why(result: RunResult) -> str:
    if result.status in (RunStatus.OK, RunStatus.ERROR):
        return f"exit status {result.exit_code}"
    return str(result.status)


def _end(program: Program) -> None:
    try:
        program.kill()
    except SandboxError:
        return  # its sandbox is broken, and will be seen to be when it is used next


@cache
def _package() -> dict[str, bytes]:
    """This package's files for the sandboxes, in packages that hold nothing else."""
    folders = __package__.split(".")
    files = {"/".join([*folders[:n], "__init__.py"]): b"" for n in range(1, len(folders) + 1)}
    for name in ("tagged.py", "serve_solution.py", "run_tests.py"):
        files["/".join([*folders, name])] = (_FOLDER / name).read_bytes()
    return files
