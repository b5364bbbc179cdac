"""Runs beside a solution, in its sandbox: calls its functions when it is asked to.

The first line that it writes is a string that says whether the solution could be loaded; then each
line that it reads is a call, and each that it writes an answer. What the solution prints goes
elsewhere.
"""

from __future__ import annotations

import json
import os
import traceback
from typing import Any

from ludic.envs.code_exec.function_tests import tagged


def main() -> None:
    calls = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    names: dict[str, Any] = {"__name__": "solution"}
    told = "ready"
    try:
        with open("solution.py", "rb") as source:
            text = source.read()
        try:
            code = compile(text, "solution.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            told = f"no_python {last_line(error)}"
        else:
            load_setup(job["setup"], names)
            exec(code, names)
            if not callable(names.get(job["entry_point"])):
                told = f"failed there is no function {job['entry_point']!r}"
    except BaseException as error:
        told = f"failed {last_line(error)}"
        traceback.print_exc()
    answers.write(json.dumps(told) + "\n")
    answers.flush()
    if told != "ready":
        return
    for line in calls:
        answers.write(json.dumps(answer(json.loads(line), names)) + "\n")
        answers.flush()


def load_setup(setup: str, names: dict[str, Any]) -> None:
    """The helpers that a task's prompt brings. It may end in a function without a body."""
    if not setup:
        return
    try:
        code = compile(setup, "setup.py", "exec", dont_inherit=True)
    except SyntaxError:
        code = compile(setup.rstrip() + "\n    pass\n", "setup.py", "exec", dont_inherit=True)
    exec(code, names)


def answer(call: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The value or the exception of one call, and its arguments if they were changed."""
    try:
        args = tagged.decode(call["args"])
        kwargs = tagged.decode(call["kwargs"])
        value = names[call["function"]](*args, **kwargs)
        found: dict[str, Any] = {"value": tagged.encode(value)}
        after = tagged.encode(args)
        if after != call["args"]:
            found["args"] = after
        return found
    except BaseException as error:
        traceback.print_exc()
        return {"error": [type(error).__name__, str(error)[:1000]]}


def last_line(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()[:1000]
