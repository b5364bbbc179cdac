"""Runs a task's own asserts, in a sandbox without the solution, which it calls over a pipe."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from typing import Any, TextIO

from ludic.envs.code_exec.function_tests import tagged
from ludic.envs.code_exec.function_tests.serve_solution import last_line, load_setup


class SolutionError(Exception):
    """The solution raised an exception that tests do not know, or is gone."""


def main() -> None:
    answers = os.fdopen(os.dup(0), "r", encoding="utf-8")
    calls = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    results: list[dict[str, Any]] = []
    for test in job["tests"]:
        solution = remote(job["entry_point"], calls, answers)
        names: dict[str, Any] = {"__name__": "tests"}
        try:
            load_setup(job["setup"], names)
            names[job["entry_point"]] = names["candidate"] = solution
            exec(compile(test, "tests.py", "exec", dont_inherit=True), names)
            results.append({"passed": True})
        except BaseException as error:
            results.append({"passed": False, "error": last_line(error)})
            if job["stop_at_failure"]:
                break
    calls.write(json.dumps({"results": results}) + "\n")
    calls.flush()


def remote(function: str, calls: TextIO, answers: TextIO) -> Callable[..., Any]:
    """Stands for the solution's function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        request = {
            "function": function,
            "args": tagged.encode(given),
            "kwargs": tagged.encode(kwargs),
        }
        calls.write(json.dumps(request) + "\n")
        calls.flush()
        line = answers.readline()
        if not line:
            raise SolutionError("the solution is gone")
        answer = json.loads(line)
        if "args" in answer:
            for mine, theirs in zip(given, tagged.decode(answer["args"]), strict=True):
                change(mine, theirs)
        if "error" in answer:
            name, message = answer["error"]
            kind = getattr(builtins, name, None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise SolutionError(f"{name}: {message}")
            if issubclass(kind, UnicodeError):
                kind = ValueError
            raise kind(message)
        return tagged.decode(answer["value"])

    call.__name__ = function
    return call


def change(mine: Any, theirs: Any) -> None:
    """An argument that the solution changed in place changes here too."""
    if isinstance(mine, list | bytearray) and type(mine) is type(theirs):
        mine[:] = theirs
    elif isinstance(mine, dict | set) and type(mine) is type(theirs):
        mine.clear()
        mine.update(theirs)
