"""Tools that compute: `python`, a session that keeps its state, in a sandbox, and `calculator`:
arithmetic from text, without `eval`, by a small parser that is bounded in time and size."""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.sandbox.base import Limits, SandboxError, text_of_line
from ludic.envs.code_exec.sandbox.pool import (
    DEFAULT_SANDBOX,
    SandboxPool,
    check_sandbox,
    shared_pool,
)
from ludic.envs.code_exec.sandbox.worker import Program

_MAX_LINE, _MAX_TEXT = 128 << 10, 9000
"""What a session says is shortened there, below these."""
_SESSIONS = 64
_PROGRAM = Path(__file__).with_name("session_program.py")


def session_pool(sandbox: str) -> SandboxPool:
    """The sandboxes of all sessions of this process: at most 64 at the same time."""
    return shared_pool(sandbox, _SESSIONS, queue_s=30.0)


class PythonTool:
    """A Python session, for one agent at a time. It begins with the first call, in a sandbox; a
    call that takes longer than `call_s`, or goes beyond the `limits` of the session, ends it, and
    the next one starts from scratch. The docstring of `__call__` is what a model is told of it.
    """

    __name__ = "python"

    def __init__(
        self, *, sandbox: str = DEFAULT_SANDBOX, call_s: float = 10.0, limits: Limits | None = None
    ) -> None:
        self.__doc__ = inspect.getdoc(type(self).__call__)
        self.call_s = call_s
        self._sandbox = sandbox
        self._limits = limits or Limits(wall_s=3600, cpu_s=600, output_kb=64 * 1024)
        self._lock = threading.Lock()
        self._lease = ExitStack()
        self._program: Program | None = None

    def __call__(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last expression.
        Variables, imports and files are kept until the end of the episode.

        Args:
            code: The code to run.
        """
        with self._lock:
            try:
                return self._run(code)
            except SandboxError:
                self._end()
                raise

    def check_machine(self) -> None:
        """Raises if this machine cannot run the sandbox; asked before a run begins."""
        check_sandbox(self._sandbox)

    def close(self) -> None:
        """Ends the session. A later call begins a new one."""
        with self._lock:
            self._end()

    def _run(self, code: str) -> str:
        if "\0" in code:
            return "ValueError: the code contains null bytes"
        program = self._program or self._start()
        program.send(json.dumps(code).encode() + b"\n")
        try:
            line = program.receive_line(self.call_s, _MAX_LINE)
        except TimeoutError:
            self._end()
            return (
                f"TimeoutError: the code did not end within {self.call_s:g} s. The session was "
                "ended; the next call starts an empty one."
            )
        if line is None:
            status = program.finish().status
            self._end()
            return f"The session ended ({status}); the next call starts an empty one."
        output = text_of_line(line)
        if output is None or len(output) > _MAX_TEXT:
            self._end()
            return "The session ended: it wrote to the pipe that it is asked through."
        return output

    def _start(self) -> Program:
        (sandbox,) = self._lease.enter_context(session_pool(self._sandbox).lease())
        self._program = sandbox.open(
            {"session_program.py": _PROGRAM.read_bytes()},
            ["python", "session_program.py"],
            self._limits,
        )
        return self._program

    def _end(self) -> None:
        program, self._program = self._program, None
        lease, self._lease = self._lease, ExitStack()
        with lease, suppress(SandboxError):
            if program is not None:
                program.kill()

    def __del__(self) -> None:
        with suppress(Exception):
            self._end()


MAX_CHARS = 1000
MAX_DEPTH = 60
MAX_BITS = 4096

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _round(value: float, digits: int = 0) -> int | float:
    if not isinstance(digits, int) or abs(digits) > 300:
        raise ValueError("round takes up to 300 digits")
    return round(value, digits) if digits else round(value)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp,
    "log": math.log, "log2": math.log2, "log10": math.log10, "sin": math.sin, "cos": math.cos,
    "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan, "floor": math.floor,
    "ceil": math.ceil, "gcd": math.gcd,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression, such as (3 + 4) * 2**10 / 7 or sqrt(2) * pi.

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt, log,
            sin, round, min and max.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("that is not an arithmetic expression") from None
    value = _value(tree.body, 0)
    return repr(value) if isinstance(value, float) else str(value)


def _value(node: ast.expr, depth: int) -> int | float:
    if depth > MAX_DEPTH:
        raise ValueError("the expression is nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and not node.keywords
    ):
        values = [_value(argument, depth + 1) for argument in node.args]
        return _bounded(_FUNCTIONS[node.func.id](*values))
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if base.bit_length() * exponent > MAX_BITS:
            raise ValueError(f"the result of {base} ** {exponent} would be too large")
        return int(base**exponent)
    return _bounded(base**exponent)


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the result is too large")
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return value
