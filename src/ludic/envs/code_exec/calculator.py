"""Arithmetic from text, without `eval`: a small parser, bounded in time and size."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

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
