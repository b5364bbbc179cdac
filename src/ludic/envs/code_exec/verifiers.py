"""When a program's output counts as right. Comparison happens here, outside of every sandbox that
has run the program; only a checker is itself a program, and gets a sandbox without the solution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ludic.envs.code_exec.sandbox.base import Limits, RunResult, text_of
from ludic.envs.code_exec.sandbox.pool import SandboxPool
from ludic.errors import ConfigError, EnvError, UnknownNameError


class CheckerTimeoutError(EnvError):
    """A checker ran out of time: over an odd output, or because the machine is busy."""


class Verifier(Protocol):
    """Judges one output. `fingerprint` tells verifiers apart that judge differently."""

    @property
    def fingerprint(self) -> str: ...

    def __call__(self, pool: SandboxPool, stdin: str, expected: str, output: bytes) -> bool: ...


class _ByFields:
    """Verifiers with the same fields judge alike."""

    __slots__ = ()

    @property
    def fingerprint(self) -> str:
        return repr(self)


@dataclass(frozen=True, slots=True)
class ExactVerifier(_ByFields):
    """The very same bytes."""

    def __call__(self, pool: SandboxPool, stdin: str, expected: str, output: bytes) -> bool:
        return output == expected.encode()


@dataclass(frozen=True, slots=True)
class WhitespaceVerifier(_ByFields):
    """The same words in the same lines: spaces between them, spaces at the end of a line, and
    empty lines at the end do not count."""

    def __call__(self, pool: SandboxPool, stdin: str, expected: str, output: bytes) -> bool:
        return _lines(output.decode("utf-8", "replace")) == _lines(expected)


@dataclass(frozen=True, slots=True)
class FloatVerifier(_ByFields):
    """The same words, where two numbers are the same within a relative or absolute tolerance."""

    rel: float = 1e-6
    abs: float = 1e-9

    def __call__(self, pool: SandboxPool, stdin: str, expected: str, output: bytes) -> bool:
        actual, wanted = _lines(output.decode("utf-8", "replace")), _lines(expected)
        return len(actual) == len(wanted) and all(
            len(a) == len(b) and all(map(self._same, a, b))
            for a, b in zip(actual, wanted, strict=True)
        )

    def _same(self, actual: str, wanted: str) -> bool:
        if actual == wanted:
            return True
        a, b = _number(actual), _number(wanted)
        if a is None or b is None:
            return False
        if math.isnan(b):
            return math.isnan(a)
        return math.isclose(a, b, rel_tol=self.rel, abs_tol=self.abs)


@dataclass(frozen=True, slots=True)
class CheckerVerifier(_ByFields):
    """A Python program that decides: for tasks with several right answers.

    It finds `input.txt`, `expected.txt` and `output.txt` in its folder, and accepts with exit
    status 0. Whatever else happens rejects, a crash over an odd output too; only a checker that
    is not Python is an `EnvError`, and one that waits too long a `CheckerTimeoutError`. It runs in
    a sandbox that never ran a solution.
    """

    program: str
    limits: Limits = field(default_factory=Limits)

    def __call__(self, pool: SandboxPool, stdin: str, expected: str, output: bytes) -> bool:
        files = {
            "checker.py": self.program.encode(),
            "input.txt": stdin.encode(),
            "expected.txt": expected.encode(),
            "output.txt": output,
        }
        result = pool.run(files, ["python", "checker.py"], b"", self.limits, role="judge")
        if result.late:
            raise CheckerTimeoutError("the checker ran out of time")
        if is_syntax_error(result):
            stderr = text_of(result.stderr, last=500)
            raise EnvError(f"the checker program does not compile: {stderr}")
        return result.ok


def make_verifier(spec: str | Mapping[str, Any] | Verifier) -> Verifier:
    """`"exact"`, `"whitespace"`, `"float"`, or a mapping of "kind" and its arguments:
    `{"kind": "float", "rel": 1e-4}`, `{"kind": "checker", "program": "…"}`."""
    if not isinstance(spec, str | Mapping):
        return spec
    options: dict[str, Any] = {"kind": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("kind", None)
    kinds: dict[str, type[Any]] = {
        "exact": ExactVerifier,
        "whitespace": WhitespaceVerifier,
        "float": FloatVerifier,
        "checker": CheckerVerifier,
    }
    if name not in kinds:
        raise UnknownNameError("verifier", str(name), kinds)
    if "limits" in options:
        options["limits"] = Limits.of(options["limits"])
    try:
        made: Verifier = kinds[name](**options)
    except TypeError as error:
        raise ConfigError(f"verifier {name!r} with {options}: {error}") from error
    return made


_SYNTAX = (b"SyntaxError:", b"IndentationError:", b"TabError:", b"source code string cannot")


def is_syntax_error(result: RunResult) -> bool:
    """Whether a program ended before its first line because it is not Python. One that ran, and
    read something else as Python (`eval(input())`), leaves a traceback."""
    last = result.stderr.rstrip().rpartition(b"\n")[2]
    ran = b"\nTraceback (most recent call last):" in b"\n" + result.stderr
    return result.exit_code == 1 and not (ran or result.stdout) and last.startswith(_SYNTAX)


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _number(word: str) -> float | None:
    if len(word) > 400 or "_" in word:
        return None
    try:
        return float(word)
    except ValueError:
        return None
