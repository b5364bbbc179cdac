"""Runs a task's own asserts, in a sandbox without the solution, which it calls over a pipe.

Each line that it writes begins with a letter: `C` and a call, `P` for a test that passed, `F` and
why one did not, and a full stop at the end. Why is the text of what the solution raised, and only
the name of what the test raised: its text may hold what was expected.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any, TextIO

from ludic.envs.code_exec.serve_solution import begin, decode, encode, last_line, load_setup


class SolutionError(Exception):
    """The solution raised an exception that tests do not know, or is gone."""


def main() -> None:
    answers, calls, job = begin()
    for test in job["tests"]:
        solution = Remote(job["entry_point"], calls, answers)
        names: dict[str, Any] = {"__name__": "tests"}
        why: str | None = None
        try:
            load_setup(job["setup"], names)
            names[job["entry_point"]] = names["candidate"] = solution.function()
            exec(compile(test, "tests.py", "exec", dont_inherit=True), names)
        except BaseException as error:
            why = last_line(error) if error is solution.raised else type(error).__name__
        calls.write("P\n" if why is None else f"F{json.dumps(why)}\n")
        if why is not None and job["stop_at_failure"]:
            break
    calls.write(".\n")


class Remote:
    """The solution's function, called over the pipe; `raised` is what its last call raised."""

    def __init__(self, name: str, calls: TextIO, answers: TextIO) -> None:
        self.name, self.calls, self.answers = name, calls, answers
        self.raised: Exception | None = None

    def function(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(list(args), kwargs)

        call.__name__ = self.name
        return call

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        request = {"function": self.name, "args": encode(args), "kwargs": encode(kwargs)}
        self.calls.write(f"C{json.dumps(request)}\n")
        answer = json.loads(self.answers.readline() or '{"error": ["", "the solution is gone"]}')
        if "args" in answer:
            for mine, theirs in zip(args, decode(answer["args"]), strict=True):
                change(mine, theirs)
        if "error" in answer:
            name, message = answer["error"]
            self.raised = exception(str(name), str(message))
            raise self.raised
        return decode(answer["value"])


def exception(name: str, message: str) -> Exception:
    """One of Python's own, by its name, so that a test can expect it."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return SolutionError(f"{name}: {message}")
    if issubclass(kind, UnicodeError):
        kind = ValueError
    return kind(message)


def change(mine: Any, theirs: Any) -> None:
    """An argument that the solution changed in place changes here too."""
    if isinstance(mine, list | bytearray) and type(mine) is type(theirs):
        mine[:] = theirs
    elif isinstance(mine, dict | set) and type(mine) is type(theirs):
        mine.clear()
        mine.update(theirs)
