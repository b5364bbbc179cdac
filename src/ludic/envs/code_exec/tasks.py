"""Programming tasks: what is asked, and how an answer is tried. Adapters make them from rows."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ludic.envs.dataset_rows import Row
from ludic.errors import EnvError
from ludic.plumbing.naming import Entry, Registry


@dataclass(frozen=True, slots=True)
class IOCase:
    """What a program is given on standard input, and what it should write."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class StdioTask:
    """A whole program that reads standard input and writes standard output. `checker` is the
    source of a program that judges instead of the environment's verifier."""

    prompt: str
    cases: tuple[IOCase, ...]
    checker: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if not self.cases:
            raise EnvError(f"task {self.key or self.prompt[:60]!r} has no cases to try it on")


@dataclass(frozen=True, slots=True)
class FunctionTask:
    """A function that asserts call. `tests` are pieces of code, which know it by its name and as
    `candidate`; `setup` brings helpers, on both sides. With `completes`, an answer that begins
    with an indented line continues the setup instead of standing alone."""

    prompt: str
    entry_point: str
    tests: tuple[str, ...]
    setup: str = ""
    completes: bool = False
    key: str | None = None

    def __post_init__(self) -> None:
        if not any(test.strip() for test in self.tests):
            raise EnvError(f"task {self.key or self.prompt[:60]!r} has no tests to try it on")

    def program(self, code: str) -> str:
        """The answer as a program that can be loaded."""
        first = next((line for line in code.splitlines() if line.strip()), "")
        if self.completes and first[:1] in (" ", "\t"):
            return self.setup + code
        return code


CodeTask: TypeAlias = StdioTask | FunctionTask
Adapter: TypeAlias = Callable[[Row], CodeTask]

ADAPTERS = Registry(
    "task adapter",
    {
        "stdio": Entry(f"{__name__}:stdio_task", "Standard input and output, APPS style."),
        "humaneval": Entry(f"{__name__}:humaneval_task", "A function to complete, with a check."),
        "mbpp": Entry(f"{__name__}:mbpp_task", "A function by its description, with asserts."),
    },
    "ludic.code_tasks",
)


def stdio_task(row: Row) -> StdioTask:
    """APPS' columns (`question`, `input_output`), or `prompt` with `inputs` and `outputs`; a
    `checker` is optional."""
    given: Any = row.get("input_output", row)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise EnvError(f"the column 'input_output' is not JSON: {error}") from error
    if not isinstance(given, Mapping) or not {"inputs", "outputs"} <= given.keys():
        raise EnvError(f"a stdio task needs 'inputs' and 'outputs'; the row has {sorted(row)}")
    inputs, outputs = given["inputs"], given["outputs"]
    if len(inputs) != len(outputs):
        raise EnvError(f"a stdio task has {len(inputs)} inputs and {len(outputs)} outputs")
    cases = tuple(IOCase(_text(a), _text(b)) for a, b in zip(inputs, outputs, strict=True))
    checker = row.get("checker")
    key = row.get("id", row.get("problem_id"))
    return StdioTask(
        str(_column(row, "question", "prompt")),
        cases,
        None if checker is None else str(checker),
        None if key is None else str(key),
    )


def humaneval_task(row: Row) -> FunctionTask:
    """HumanEval's columns: `prompt`, `entry_point`, `test`, `task_id`."""
    prompt, name = str(_column(row, "prompt")), str(_column(row, "entry_point"))
    test = f"{_column(row, 'test')}\ncheck({name})\n"
    asked = f"Complete this function. Answer with the whole function.\n\n```python\n{prompt}```"
    key = None if "task_id" not in row else str(row["task_id"])
    return FunctionTask(asked, name, (test,), setup=prompt, completes=True, key=key)


def mbpp_task(row: Row) -> FunctionTask:
    """MBPP's columns: `text` or `prompt`, `test_list`, `test_setup_code`, `task_id`. The function's
    name is that of the first assert, which the prompt shows."""
    tests = tuple(map(str, _column(row, "test_list")))
    name = _called(tests[0]) if tests else None
    if name is None:
        raise EnvError(f"no function is called in the first assert of {row.get('task_id')!r}")
    text = str(_column(row, "text", "prompt"))
    imports = row.get("test_imports") or ()
    setup = "\n".join([*map(str, imports), str(row.get("test_setup_code") or "")])
    key = None if "task_id" not in row else str(row["task_id"])
    asked = f"{text}\nYour code should pass this test:\n\n```python\n{tests[0]}\n```"
    return FunctionTask(asked, name, tests, setup=setup, key=key)


_OPENING = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)")


def extract_code(answer: str, languages: Sequence[str] = ("python", "py", "python3")) -> str:
    """The program in an answer: its last fenced block, in one of the languages if there is one, or
    all of it where nothing is fenced. Takes time in proportion to the answer, whatever it is."""
    fence, language, begin = "", "", 0
    last: dict[bool, str] = {}
    lines = answer.replace("\r\n", "\n").split("\n")
    closed_at = {line.strip(" \t"): number for number, line in enumerate(lines)}
    for number, line in enumerate(lines):
        if fence and line.strip(" \t") == fence:
            code = "".join(f"{one}\n" for one in lines[begin:number])
            last[language.lower() in languages] = code
            fence = ""
            continue
        opening = None if fence else _OPENING.match(line)
        if opening and closed_at.get(opening[1], number) > number:
            fence, language, begin = opening[1], opening[2], number + 1
    return last.get(True, last.get(False, answer))


def _called(test: str) -> str | None:
    """The first function in an assert that Python does not bring itself."""
    try:
        nodes = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    except SyntaxError as error:
        raise EnvError(f"the test {test[:80]!r} is not Python: {error}") from error
    names = [
        (node.lineno, node.col_offset, node.func.id)
        for node in nodes
        if isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id)
    ]
    return min(names)[2] if names else None


def _column(row: Row, *names: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise EnvError(f"a row has no column {' or '.join(map(repr, names))}; it has {sorted(row)}")


def _text(value: Any) -> str:
    """A case's input or output: text, or a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
