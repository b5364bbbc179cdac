"""From an answer to a verdict: extracts the code, tries it, and compares outside."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from ludic.envs.code_exec.function_tests import run_function_tests
from ludic.envs.code_exec.sandbox.base import Limits, RunResult, RunStatus, text_of
from ludic.envs.code_exec.sandbox.pool import SandboxPool
from ludic.envs.code_exec.tasks import CodeTask, FunctionTask, StdioTask, extract_code
from ludic.envs.code_exec.verifiers import (
    CheckerTimeoutError,
    CheckerVerifier,
    Verifier,
    is_syntax_error,
)

_SHOWN = 1500
T = TypeVar("T")


class Outcome(StrEnum):
    """What became of an answer."""

    PASSED = "passed"
    FAILED = "failed"
    """It ran, and at least one test did not accept what it did."""
    CRASHED = "crashed"
    """It raised, or a limit ended it."""
    NO_COMPILE = "no_compile"
    """It is not Python."""
    NO_CODE = "no_code"
    TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many of the tests passed, and what the answer's author may be told."""

    outcome: Outcome
    passed: int
    total: int
    message: str
    status: str | None = None
    late: bool = False
    """Whether a busy machine may be to blame. It has been tried twice, the second time alone."""

    @property
    def compiles(self) -> bool:
        return self.outcome not in (Outcome.NO_COMPILE, Outcome.NO_CODE, Outcome.TOO_LONG)


class ResultCache(Generic[T]):
    """The last `max_entries` results. Any thread may use it.

    Two threads with the same question may both work on it; the answer is the same. What raises
    (a sandbox that failed) leaves nothing behind.
    """

    def __init__(self, max_entries: int = 16384) -> None:
        self.max_entries = max_entries
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, T] = OrderedDict()

    def get(
        self, key: bytes, work: Callable[[], T], keep: Callable[[T], bool] = lambda result: True
    ) -> T:
        """What `work()` returned for this key before, or returns now; remembered if `keep`."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
        result = work()
        if not keep(result):
            return result
        with self._lock:
            self._results[key] = result
            while len(self._results) > self.max_entries:
                self._results.popitem(last=False)
        return result

    def __len__(self) -> int:
        return len(self._results)


@dataclass(frozen=True, slots=True)
class Judge:
    """Tries answers. With `all_tests=False` it stops at the first that fails.

    `budget_s` bounds the time that one answer's programs run, over all its tests; those that it
    does not reach have not passed. A verdict that depends on the machine's load (a program waited
    until its time was over) is sought once more while nothing else runs, and is not remembered.
    """

    pool: SandboxPool
    verifier: Verifier
    limits: Limits
    sandbox: str
    all_tests: bool = False
    max_code_kb: float = 256
    budget_s: float = 45.0
    cache: ResultCache[Verdict] | None = None

    def __call__(self, task: CodeTask, answer: str) -> Verdict:
        """A `SandboxError` passes through: it is not a verdict, and is not remembered."""
        code = extract_code(answer)
        total = len(task.cases) if isinstance(task, StdioTask) else len(task.tests)
        if not code.strip():
            return Verdict(Outcome.NO_CODE, 0, total, "There is no code in the answer.")
        if isinstance(task, FunctionTask):
            code = task.program(code)
        try:
            source = code.encode()
        except UnicodeEncodeError:
            message = "The code is not valid text: it cannot be written as UTF-8."
            return Verdict(Outcome.NO_COMPILE, 0, total, message)
        if len(source) > self.max_code_kb * 1024:
            message = f"The code is longer than {self.max_code_kb:g} KB."
            return Verdict(Outcome.TOO_LONG, 0, total, message)
        if b"\0" in source:
            message = "The code does not compile: it contains null bytes."
            return Verdict(Outcome.NO_COMPILE, 0, total, message)
        if self.cache is None:
            return self._settled(task, source)
        how = (self.verifier.fingerprint, asdict(self.limits), self.sandbox, self.all_tests)
        key = fingerprint(code, type(task).__name__, asdict(task), *how, self.budget_s)
        return self.cache.get(key, lambda: self._settled(task, source), keep=_lasts)

    def _settled(self, task: CodeTask, source: bytes) -> Verdict:
        """A verdict that a busy machine may be to blame for is sought once more, alone."""
        verdict = self._try(task, source)
        return self._try(task, source, alone=True) if verdict.late else verdict

    def _try(self, task: CodeTask, source: bytes, *, alone: bool = False) -> Verdict:
        if isinstance(task, StdioTask):
            return self._try_program(task, source, alone)
        return self._try_function(task, source, alone)

    def _try_program(self, task: StdioTask, source: bytes, alone: bool) -> Verdict:
        verifier = self.verifier
        if task.checker is not None:
            verifier = CheckerVerifier(task.checker, self.limits)
        files, command = {"main.py": source}, ["python", "main.py"]
        passed, total = 0, len(task.cases)
        first: tuple[Outcome, str, str] | None = None
        used_s, computed_s, late = 0.0, 0.0, False
        for number, case in enumerate(task.cases, start=1):
            where = f"test {number} of {total}"
            if used_s > self.budget_s:
                unreached = f"{where.capitalize()} was not reached in {self.budget_s:g} s."
                first = first or (Outcome.FAILED, unreached, "budget")
                late = late or computed_s <= 0.9 * used_s
                break
            stdin = case.stdin.encode()
            result = self.pool.run(files, command, stdin, self.limits, alone=alone)
            used_s, computed_s = used_s + result.wall_s, computed_s + result.cpu_s
            late = late or result.late
            try:
                if result.ok and verifier(self.pool, case.stdin, case.expected, result.stdout):
                    passed += 1
                    continue
                failure = (*_failure(result, where), str(result.status))
            except CheckerTimeoutError as error:
                failure, late = (Outcome.FAILED, f"In {where}, {error}.", "checker"), True
            if is_syntax_error(result):
                message = f"The code does not compile:\n{text_of(result.stderr, _SHOWN)}"
                return Verdict(Outcome.NO_COMPILE, 0, total, message)
            first = first or failure
            if not self.all_tests:
                break
        if first is None:
            return Verdict(Outcome.PASSED, passed, total, _all_passed(total), "ok")
        return Verdict(first[0], passed, total, first[1], first[2], late)

    def _try_function(self, task: FunctionTask, source: bytes, alone: bool) -> Verdict:
        results = run_function_tests(
            self.pool,
            source,
            entry_point=task.entry_point,
            tests=task.tests,
            setup=task.setup,
            limits=self.limits,
            stop_at_failure=not self.all_tests,
            alone=alone,
        )
        total = len(task.tests)
        status = None if results.ended is None else str(results.ended)
        if results.failed is not None:
            if not results.compiles:
                message = f"The code does not compile: {results.failed}"
                return Verdict(Outcome.NO_COMPILE, 0, total, message)
            message = f"The code could not be loaded: {results.failed}"
            return Verdict(Outcome.CRASHED, 0, total, message, status, results.late)
        passed = sum(error is None for error in results.errors)
        if passed == total:
            return Verdict(Outcome.PASSED, passed, total, _all_passed(total), "ok")
        failures = ((n, e) for n, e in enumerate(results.errors, start=1) if e is not None)
        number, error = next(failures, (len(results.errors) + 1, ""))
        outcome, what = Outcome.FAILED, "gave a wrong result"
        if results.ended is not None:
            outcome, what = Outcome.CRASHED, f"was ended: {results.ended}"
        elif error and not error.startswith("AssertionError"):
            outcome, what = Outcome.CRASHED, f"failed with {error[:_SHOWN]}"
        message = f"Test {number} of {total}: `{task.entry_point}` {what}."
        return Verdict(outcome, passed, total, message, status, results.late)


def _lasts(verdict: Verdict) -> bool:
    """Whether it would be the same on a busier or quieter machine."""
    return not verdict.late and verdict.status not in (RunStatus.WALL_TIME, "budget")


def _all_passed(total: int) -> str:
    return "The test passed." if total == 1 else f"All {total} tests passed."


def _failure(result: RunResult, where: str) -> tuple[Outcome, str]:
    """What to say of a run, without a word of what was expected."""
    if result.ok:
        return Outcome.FAILED, f"Wrong output in {where}."
    if result.status in (RunStatus.ERROR, RunStatus.SIGNAL):
        stderr = text_of(result.stderr, _SHOWN)
        return Outcome.CRASHED, f"Exit status {result.exit_code} in {where}.\n{stderr}".rstrip()
    return Outcome.CRASHED, f"Ended in {where}: it went beyond its limit ({result.status})."


def fingerprint(*parts: Any) -> bytes:
    """A key for JSON-like parts: the same parts, and no others, give the same."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()
