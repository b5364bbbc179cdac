"""Runs in the sandbox behind the tool `python`: a session that keeps its names between calls."""

from __future__ import annotations

import ast
import io
import json
import os
import traceback
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

MAX_SHOWN = 8000


def main() -> None:
    calls = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")  # a line is sent at once
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for line in calls:
        answers.write(json.dumps(shortened(run(json.loads(line), names))) + "\n")


def shortened(text: str, most: int = MAX_SHOWN) -> str:
    """Returns its beginning and its end if it is longer than `most`."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def run(code: str, names: dict[str, Any]) -> str:
    """What the code prints, and its last expression's value, as an interactive Python shows it."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            tree = ast.parse(code, "<cell>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec", dont_inherit=True), names)
            if isinstance(last, ast.Expr):
                shown = ast.Expression(last.value)
                value = eval(compile(shown, "<cell>", "eval", dont_inherit=True), names)
                if value is not None:
                    print(repr(value))
        except BaseException as error:
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename != "<cell>":
                frames = frames.tb_next
            traceback.print_exception(type(error), error, frames, file=output)
    return output.getvalue()


if __name__ == "__main__":
    main()
